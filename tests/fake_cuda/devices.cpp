// Tells torch of GPUs that are not there, once it is asked to: loaded before its own libraries.
static int count = 0;
extern "C" void fake_cuda_on() { count = 64; }
namespace c10 { namespace cuda {
signed char device_count() noexcept { return count; }
bool hasPrimaryContext(signed char) { return false; }
} }
