// Makes torch report GPUs that do not exist once `fake_cuda_on` is called. Loaded before torch's own libraries.
static int count = 0;
extern "C" void fake_cuda_on() { count = 64; }
namespace c10 { namespace cuda {
signed char device_count() noexcept { return count; }
bool hasPrimaryContext(signed char) { return false; }
} }
