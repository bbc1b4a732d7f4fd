/* fake_nvml.c - a stand-in libnvidia-ml.so.1 for machines without a GPU.
 *
 * Build:  gcc -O2 -shared -fPIC -Wall -Wl,-soname,libnvidia-ml.so.1 -o lib/libnvidia-ml.so.1 fake_nvml.c -lm -lpthread
 *         (-DOLD_DRIVER: no *_v3 processes, no MemoryInfo_v2, no TemperatureV, no ClocksEventReasons)
 *
 * Environment
 *   FAKE_NVML_GPUS=8             number of GPUs (0..64)
 *   FAKE_NVML_NAME="NVIDIA H200" device name
 *   FAKE_NVML_MEM_MIB=143771     memory per GPU
 *   FAKE_NVML_PIDS=11,12,...     pids to show, spread round-robin over the GPUs (default: the caller's parent on GPU 0)
 *   FAKE_NVML_PID_MIB=61440      memory of each such process
 *   FAKE_NVML_FAULTS=SPEC,SPEC   SPEC = GPU|*:FAULT[=VALUE][@T0[-T1]]   (seconds after the first nvmlInit, or by `fake_time`)
 *     whole-GPU faults (every call on the device, and the handle look-up):
 *       lost (GPU_IS_LOST) unknown (999) reset (RESET_REQUIRED) os (OPERATING_SYSTEM) noperm (NO_PERMISSION) timeout irq
 *       hang (every call blocks for ever)  slow=MS (every call sleeps MS)
 *     per-field faults: no_X -> NOT_SUPPORTED, err_X -> UNKNOWN, perm_X -> NO_PERMISSION, fnf_X -> FUNCTION_NOT_FOUND,
 *                       nodata_X -> NO_DATA, notready_X -> NOT_READY, lost_X -> GPU_IS_LOST, slow_X=MS
 *       X in: name uuid serial pci memory_info util temp power power_limit fan clock max_clock pstate persistence
 *             compute_mode display mig procs gprocs procutil pcie pcielink codec ecc throttle energy bus cores cc bar1 fields rows pages numa
 *             nvlink p2p topo violation index driver_model samples gpm events
 *       (memory_info and also the alias mem; no_memory_info is what GB10/Grace/Jetson report)
 *     value faults:
 *       mem_zero (total=0) procs_na (usedGpuMemory = N/A) dead_pids (pids that do not exist) many_procs=N
 *       idle (no memory in use, utilisation 0)  latched (no memory in use, utilisation 100)
 *       bad_name (name with invalid UTF-8) long_name mig=N (MIG on, with N slices: at most 7, and 2 without a number) util_hi (util 105) power_w=N  throttle_on
 *       u32max (utilisation, temperature, power, power limit and fan speed have all bits set) temp_neg (-5 degrees; the unsigned function wraps around)
 *       mem_max (used is 2^64-1) used_over (used is twice the total) total_max (total is 2^63) plim0 (power limit 0 W)
 *       fan_hi (140 %) thr=N (the throttle reasons, as a bit mask) cmode=N (compute mode: 2 prohibited, 3 exclusive)
 *       pending (rows await remapping) failed_rows (a row could not be remapped) pages (retired pages are pending)
 *       recovery=N (the recovery action that the driver asks for; of type T with recovery_type=T; NOT_SUPPORTED without it)
 *       uuid=N (a different GPU: N is added to the UUID)
 *       unload (like a driver that is unloaded: everything returns UNINITIALIZED, and nvmlInit fails; afterwards, a GPU
 *       answers only once nvmlShutdown has been called as often as nvmlInit, and then nvmlInit again)
 *       dropped (lost, and stays lost afterwards until nvmlInit is called again, as after a reset)
 *       gone (lost; from the next nvmlInit on, neither this GPU nor any later one is counted)
 *       xid=N (an error with this number is reported once, when the fault begins)
 *       p2p=N (peer-to-peer status with later GPUs)  topo=N (topology level shared with them)  ecc=N  both_lists (each process is also in the graphics list)  graphics (each process is only in that list)
 *       enc=N dec=N (encoder and decoder utilisation of each process)  bad_pids (0 and 2^32-1 are among the pids)
 *   FAKE_NVML_INIT_ERROR=N       nvmlInit returns N (9 DRIVER_NOT_LOADED, 18 LIB_RM_VERSION_MISMATCH, 4, 11, 12, 999 ...)
 *   FAKE_NVML_INIT_MS=N          nvmlInit takes N ms, as when no GPU is in persistence mode
 *   FAKE_NVML_MODULE=FILE        file with the kernel module's version; unless it is this library's, everything is a MISMATCH
 *   FAKE_NVML_COUNT_ERROR=N      nvmlDeviceGetCount returns N
 *   FAKE_NVML_LATENCY_US=N       every device call takes N us
 *   FAKE_NVML_LATENCY=fn=us,...  per-function latency, e.g. nvmlDeviceGetPcieThroughput=20000
 *   FAKE_NVML_LOG=FILE           on exit append "calls <function> <count> <seconds>" lines to FILE.<pid>
 *   FAKE_NVML_OPEN=FILE          write how many times NVML is currently open to FILE.<pid> whenever that changes
 *   FAKE_NVML_T0=EPOCH           fixed time origin of the waves (for repeatable pictures)
 */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef unsigned int u32;
typedef unsigned long long u64;
enum { OK = 0, UNINIT = 1, INVAL = 2, NOTSUP = 3, NOPERM = 4, NOTFOUND = 6, INSUFF = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10,
       IRQ = 11, LIBNF = 12, FNF = 13, LOST = 15, RESETREQ = 16, OSERR = 17, MISMATCH = 18, NODATA = 21, VERMISMATCH = 25,
       NOTREADY = 27, UNKNOWN = 999 };

typedef struct dev { int i; int mig; /* -1 = whole GPU, else the instance */ } dev;
typedef dev *D;
#define MAXG 64
#define MOST_MIG 7
static dev gpus[MAXG], migs[MAXG][MOST_MIG];
static int ngpu = 8, nfault, npid, init_count;
static int pids[1024];
static double t_init, t_origin, t_opened;
/* unless negative, the seconds that decide which faults are active, in place of the clock; a test sets it by ctypes */
__attribute__((visibility("default"))) volatile double fake_time = -1;
static u64 mem_mib = 143771, pid_mib = 61440;
static const char *gpu_name = "NVIDIA H200";
static long lat_us;
static struct { char fn[64]; long us; } lat[32];
static int nlat;
static struct { int g; char name[32]; double val, t0, t1; } faults[256];

struct ctr { const char *fn; _Atomic u64 n; struct ctr *next; _Atomic int on; };
static struct ctr *ctrs;
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static double wall(void) { struct timespec t; clock_gettime(CLOCK_REALTIME, &t); return t.tv_sec + t.tv_nsec * 1e-9; }

__attribute__((constructor)) static void setup(void) {
  const char *s;
  if ((s = getenv("FAKE_NVML_GPUS"))) ngpu = atoi(s);
  if (ngpu < 0) ngpu = 0;
  if (ngpu > MAXG) ngpu = MAXG;
  if ((s = getenv("FAKE_NVML_NAME"))) gpu_name = s;
  if ((s = getenv("FAKE_NVML_MEM_MIB"))) mem_mib = strtoull(s, 0, 10);
  if ((s = getenv("FAKE_NVML_PID_MIB"))) pid_mib = strtoull(s, 0, 10);
  if ((s = getenv("FAKE_NVML_LATENCY_US"))) lat_us = atol(s);
  t_origin = (s = getenv("FAKE_NVML_T0")) ? atof(s) : 0;
  for (int i = 0; i < MAXG; i++) {
    gpus[i].i = i; gpus[i].mig = -1;
    for (int k = 0; k < MOST_MIG; k++) { migs[i][k].i = i; migs[i][k].mig = k; }
  }
  if ((s = getenv("FAKE_NVML_PIDS")) && *s) {
    char *c = strdup(s), *sv, *t;
    for (t = strtok_r(c, ",", &sv); t && npid < 1024; t = strtok_r(0, ",", &sv)) pids[npid++] = atoi(t);
    free(c);
  } else if (!s) pids[npid++] = getppid();
  if ((s = getenv("FAKE_NVML_LATENCY"))) {
    char *c = strdup(s), *sv, *t;
    for (t = strtok_r(c, ",", &sv); t && nlat < 32; t = strtok_r(0, ",", &sv)) {
      char *e = strchr(t, '=');
      if (!e) continue;
      *e = 0; snprintf(lat[nlat].fn, sizeof lat[0].fn, "%s", t); lat[nlat++].us = atol(e + 1);
    }
    free(c);
  }
  if ((s = getenv("FAKE_NVML_FAULTS"))) {
    char *c = strdup(s), *sv, *t;
    for (t = strtok_r(c, ",", &sv); t && nfault < 256; t = strtok_r(0, ",", &sv)) {
      char *at = strchr(t, '@'), *eq, *col = strchr(t, ':');
      if (!col) continue;
      faults[nfault].t0 = 0; faults[nfault].t1 = 1e18; faults[nfault].val = 1;
      if (at) {
        *at = 0;
        faults[nfault].t0 = atof(at + 1);
        char *dash = strchr(at + 1, '-');
        if (dash) faults[nfault].t1 = atof(dash + 1);
      }
      if ((eq = strchr(col, '='))) { *eq = 0; faults[nfault].val = atof(eq + 1); }
      *col = 0;
      faults[nfault].g = *t == '*' ? -1 : atoi(t);
      snprintf(faults[nfault].name, sizeof faults[0].name, "%s", col + 1);
      nfault++;
    }
    free(c);
  }
}

__attribute__((destructor)) static void dump(void) {
  const char *s = getenv("FAKE_NVML_LOG");
  if (!s || !ctrs) return;
  char p[4096];
  snprintf(p, sizeof p, "%s.%d", s, (int)getpid());
  FILE *f = fopen(p, "a");
  if (!f) return;
  double dt = t_init ? now() - t_init : 0;
  for (struct ctr *c = ctrs; c; c = c->next) fprintf(f, "calls %s %llu %.2f\n", c->fn, (u64)c->n, dt);
  fclose(f);
}

static void tick(struct ctr *c) {
  c->n++;
  int z = 0;
  if (atomic_compare_exchange_strong(&c->on, &z, 1)) {
    pthread_mutex_lock(&mu); c->next = ctrs; ctrs = c; pthread_mutex_unlock(&mu);
  }
}
static void zzz(long us) { if (us > 0) { struct timespec t = {us / 1000000, us % 1000000 * 1000}; while (nanosleep(&t, &t) && errno == EINTR); } }

static double elapsed(void) { return fake_time >= 0 ? fake_time : t_init ? now() - t_init : 0; }
static int fault(int g, const char *name, double *v) {
  if (!nfault) return 0;
  double t = elapsed();
  for (int k = 0; k < nfault; k++)
    if ((faults[k].g == g || faults[k].g < 0) && t >= faults[k].t0 && t < faults[k].t1 && !strcmp(faults[k].name, name)) {
      if (v) *v = faults[k].val;
      return 1;
    }
  return 0;
}
/* whether the driver has been unloaded since the library was opened */
static int unloaded(void) {
  double t = elapsed();
  for (int k = 0; k < nfault; k++)
    if (!strcmp(faults[k].name, "unload") && t >= faults[k].t0 && t_opened < faults[k].t0) return 1;
  return 0;
}
static int whole(int g) {
  double v;
  if (!nfault) return OK;
  if (unloaded()) return UNINIT;
  if (fault(g, "gone", 0)) return LOST;
  double t = elapsed();
  for (int k = 0; k < nfault; k++)
    if (faults[k].g == g && !strcmp(faults[k].name, "dropped") && t >= faults[k].t0 && (t < faults[k].t1 || t_opened < faults[k].t0)) return LOST;
  if (fault(g, "hang", 0)) for (;;) pause();
  if (fault(g, "slow", &v)) zzz((long)(v * 1000));
  if (fault(g, "lost", 0)) return LOST;
  if (fault(g, "unknown", 0)) return UNKNOWN;
  if (fault(g, "reset", 0)) return RESETREQ;
  if (fault(g, "os", 0)) return OSERR;
  if (fault(g, "noperm", 0)) return NOPERM;
  if (fault(g, "timeout", 0)) return TIMEOUT;
  if (fault(g, "irq", 0)) return IRQ;
  return OK;
}
static u32 n_slices(int g) { double v; return !fault(g, "mig", &v) ? 0 : v < 2 ? 2 : v > MOST_MIG ? MOST_MIG : (u32)v; }
/* whether a value is known only for a whole GPU, so that the driver returns NOT_SUPPORTED for a slice's handle */
static int of_card(const char *x) {
  static const char *const xs[] = {"temp", "power", "power_limit", "util", "energy", "clock", "max_clock", "fan", "throttle", "pcie", "samples"};
  for (u32 k = 0; k < sizeof xs / sizeof *xs; k++) if (!strcmp(x, xs[k])) return 1;
  return 0;
}
#ifdef OLD_DRIVER
#define DRV "450.66"
#else
#define DRV "570.172.08"
#endif
static int mismatch(void) {
  const char *s = getenv("FAKE_NVML_MODULE");
  char version[32] = "";
  FILE *f = s ? fopen(s, "r") : 0;
  if (!f) return 0;
  if (!fgets(version, sizeof version, f)) *version = 0;
  fclose(f);
  return strcmp(version, DRV) != 0;
}
static int bad(D d) { return mismatch() ? MISMATCH : !init_count ? UNINIT : (!d || d->i < 0 || d->i >= ngpu) ? INVAL : OK; }
static int field(D d, const char *x) {
  static const struct { const char *p; int r; } pre[] = {{"no_", NOTSUP}, {"err_", UNKNOWN}, {"perm_", NOPERM}, {"fnf_", FNF},
                                                       {"nodata_", NODATA}, {"notready_", NOTREADY}, {"lost_", LOST}};
  int r = bad(d);
  if (r) return r;
  if ((r = whole(d->i))) return r;
  if (!nfault || !x) return OK;
  if (d->mig >= (int)n_slices(d->i)) return NOTFOUND;
  if (d->mig >= 0 && of_card(x)) return NOTSUP;
  char b[64];
  double v;
  snprintf(b, sizeof b, "slow_%s", x);
  if (fault(d->i, b, &v)) zzz((long)(v * 1000));
  for (u32 k = 0; k < sizeof pre / sizeof *pre; k++) {
    snprintf(b, sizeof b, "%s%s", pre[k].p, x);
    if (fault(d->i, b, 0)) return pre[k].r;
  }
  if (!strcmp(x, "memory_info")) {
    if (fault(d->i, "no_mem", 0)) return NOTSUP;
    if (fault(d->i, "err_mem", 0)) return UNKNOWN;
  }
  return OK;
}
static void latency(const char *fn) {
  long us = lat_us;
  for (int k = 0; k < nlat; k++) if (!strcmp(lat[k].fn, fn)) us = lat[k].us;
  zzz(us);
}
#define X __attribute__((visibility("default")))
#define CNT(fn) do { static struct ctr c_ = {fn, 0, 0, 0}; tick(&c_); } while (0)
#define ENTER(fn, x) do { CNT(fn); if (lat_us || nlat) latency(fn); int r_ = field(d, x); if (r_) return r_; } while (0)

/* smooth time-varying values */
static double tt(void) { return wall() - t_origin; }
static double wave(int g, double period, double phase) { return 0.5 + 0.5 * sin(2 * M_PI * tt() / period + g * 0.8 + phase); }
static u32 util(int g) { return fault(g, "u32max", 0) ? ~0u : fault(g, "latched", 0) ? 100 : fault(g, "idle", 0) ? 0 : fault(g, "util_hi", 0) ? 105 : (u32)lround(5 + 93 * wave(g, 60, 0)); }
static double memfrac(int g) { return fault(g, "idle", 0) || fault(g, "latched", 0) ? 0 : 0.06 + 0.85 * wave(g, 180, 1.0); }
static u64 tot(D d) { return fault(d->i, "total_max", 0) ? 1ull << 63 : fault(d->i, "mem_zero", 0) ? 0 : (mem_mib << 20) / (d->mig >= 0 ? n_slices(d->i) : 1); }
static u64 reserved(D d) { return d->mig >= 0 ? 0 : 600ull << 20; }
static u32 power_mw(int g) { double v; if (fault(g, "u32max", 0)) return ~0u; if (fault(g, "power_w", &v)) return (u32)(v * 1000); return 78000 + (u32)(610000 * wave(g, 60, 0.1)); }
static u32 temp(int g) { return fault(g, "u32max", 0) ? ~0u : fault(g, "temp_neg", 0) ? (u32)-5 : 31 + (u32)(48 * wave(g, 60, -0.5)); }

/* ---- library ---- */
X int fake_times_open(void) { return init_count; }
static void tell_open(void) {
  const char *s = getenv("FAKE_NVML_OPEN");
  char p[4096], n[16];
  if (!s) return;
  snprintf(p, sizeof p, "%s.%d", s, (int)getpid());
  FILE *f = fopen(p, "w");
  if (!f) return;
  snprintf(n, sizeof n, "%d\n", init_count);
  fputs(n, f);
  fclose(f);
}
static int do_init(void) {
  const char *s = getenv("FAKE_NVML_INIT_ERROR");
  const char *ms = getenv("FAKE_NVML_INIT_MS");
  if (ms && !init_count) usleep(1000u * atoi(ms));
  if (s && atoi(s)) return atoi(s);
  if (mismatch()) return MISMATCH;
  if (!t_init) t_init = now();
  if (fault(-1, "unload", 0)) return DRIVER_NOT_LOADED;
  if (!init_count++) {
    t_opened = elapsed();
    for (int g = ngpu - 1; g >= 0; g--) if (fault(g, "gone", 0)) ngpu = g;
  }
  tell_open();
  return OK;
}
X int nvmlInit_v2(void) { CNT("nvmlInit_v2"); return do_init(); }
X int nvmlInit(void) { CNT("nvmlInit"); return do_init(); }
X int nvmlInitWithFlags(u32 f) { CNT("nvmlInitWithFlags"); (void)f; return do_init(); }
X int nvmlShutdown(void) { CNT("nvmlShutdown"); if (!init_count) return UNINIT; init_count--; tell_open(); return OK; }
X const char *nvmlErrorString(int r) {
  switch (r) {
    case 0: return "Success"; case 1: return "Uninitialized"; case 2: return "Invalid Argument"; case 3: return "Not Supported";
    case 4: return "Insufficient Permissions"; case 6: return "Not Found"; case 7: return "Insufficient Size";
    case 9: return "Driver Not Loaded"; case 10: return "Timeout"; case 11: return "Interrupt Request Issue";
    case 12: return "NVML Shared Library Not Found"; case 13: return "Function Not Found"; case 15: return "GPU is lost";
    case 16: return "GPU requires reset"; case 17: return "The operating system has blocked the request";
    case 18: return "Driver/library version mismatch"; case 21: return "No data"; case 25: return "Argument version mismatch";
    case 27: return "System is not in ready state"; default: return "Unknown Error";
  }
}
static int str(char *o, u32 n, const char *s) { if (!o) return INVAL; if (strlen(s) + 1 > n) return INSUFF; strcpy(o, s); return OK; }
X int nvmlSystemGetDriverVersion(char *o, u32 n) { CNT("nvmlSystemGetDriverVersion"); return init_count ? str(o, n, DRV) : UNINIT; }
X int nvmlSystemGetNVMLVersion(char *o, u32 n) { return str(o, n, "12." DRV); }
X int nvmlSystemGetCudaDriverVersion(int *v) { CNT("nvmlSystemGetCudaDriverVersion"); *v = 12080; return OK; }
X int nvmlSystemGetCudaDriverVersion_v2(int *v) { CNT("nvmlSystemGetCudaDriverVersion_v2"); *v = 12080; return OK; }
X int nvmlSystemGetProcessName(u32 pid, char *o, u32 n) {
  CNT("nvmlSystemGetProcessName");
  char p[64], b[256]; snprintf(p, sizeof p, "/proc/%u/comm", pid);
  FILE *f = fopen(p, "r"); if (!f) return NOTFOUND;
  if (!fgets(b, sizeof b, f)) b[0] = 0;
  fclose(f); b[strcspn(b, "\n")] = 0; snprintf(o, n, "%s", b); return OK;
}
X int nvmlDeviceGetCount_v2(u32 *n) {
  CNT("nvmlDeviceGetCount_v2");
  if (!init_count) return UNINIT;
  const char *s = getenv("FAKE_NVML_COUNT_ERROR");
  if (s && atoi(s)) return atoi(s);
  if (unloaded()) return UNINIT;
  *n = ngpu; return OK;
}
X int nvmlDeviceGetCount(u32 *n) { return nvmlDeviceGetCount_v2(n); }
static int handle(u32 i, D *out) { if (!init_count) return UNINIT; if (i >= (u32)ngpu) return INVAL; *out = &gpus[i]; return whole(i); }
X int nvmlDeviceGetHandleByIndex_v2(u32 i, D *o) { CNT("nvmlDeviceGetHandleByIndex_v2"); return handle(i, o); }
X int nvmlDeviceGetHandleByIndex(u32 i, D *o) { return handle(i, o); }
static void uuid(D d, char *b) {
  if (d->mig >= 0) sprintf(b, "MIG-%08x-0000-4000-8000-%012x", 0xa1b20000u + d->i, 0x100 + d->mig);
  else { double v = 0; fault(d->i, "uuid", &v); sprintf(b, "GPU-%08x-1234-4a5b-8c6d-%012x", 0xfa4e0000u + d->i + (u32)v, 0xc0ffee00u + d->i); }
}
static void busid(int i, char *b) { sprintf(b, "%08X:%02X:00.0", 0, 0x18 + i * 0x11); }
X int nvmlDeviceGetHandleByUUID(const char *u, D *o) {
  CNT("nvmlDeviceGetHandleByUUID");
  char b[96];
  if (!u) return INVAL;
  for (int i = 0; i < ngpu; i++) {
    uuid(&gpus[i], b); if (!strcmp(b, u)) return handle(i, o);
    for (int k = 0; k < (int)n_slices(i); k++) { uuid(&migs[i][k], b); if (!strcmp(b, u)) { *o = &migs[i][k]; return whole(i); } }
  }
  return NOTFOUND;
}
X int nvmlDeviceGetHandleByPciBusId_v2(const char *u, D *o) {
  CNT("nvmlDeviceGetHandleByPciBusId_v2");
  char b[64];
  if (!u) return INVAL;
  for (int i = 0; i < ngpu; i++) { busid(i, b); if (!strcasecmp(b, u) || !strcasecmp(b + 4, u)) return handle(i, o); }
  return NOTFOUND;
}
X int nvmlDeviceGetHandleByPciBusId(const char *u, D *o) { return nvmlDeviceGetHandleByPciBusId_v2(u, o); }
X int nvmlDeviceGetIndex(D d, u32 *i) { ENTER("nvmlDeviceGetIndex", "index"); *i = d->i; return OK; }
X int nvmlDeviceGetName(D d, char *o, u32 n) {
  ENTER("nvmlDeviceGetName", "name");
  char b[200];
  if (fault(d->i, "bad_name", 0)) snprintf(b, sizeof b, "NVIDIA \xff\xfe GPU");
  else if (fault(d->i, "long_name", 0)) snprintf(b, sizeof b, "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition Extra");
  else if (d->mig >= 0) snprintf(b, sizeof b, "%s MIG %ug.%llugb", gpu_name, MOST_MIG / n_slices(d->i), (mem_mib >> 10) / n_slices(d->i) + 1);
  else snprintf(b, sizeof b, "%s", gpu_name);
  return str(o, n, b);
}
X int nvmlDeviceGetUUID(D d, char *o, u32 n) { ENTER("nvmlDeviceGetUUID", "uuid"); char b[96]; uuid(d, b); return str(o, n, b); }
X int nvmlDeviceGetSerial(D d, char *o, u32 n) { ENTER("nvmlDeviceGetSerial", "serial"); char b[32]; sprintf(b, "16541230%05d", d->i); return str(o, n, b); }
X int nvmlDeviceGetMinorNumber(D d, u32 *o) { ENTER("nvmlDeviceGetMinorNumber", 0); *o = d->i; return OK; }
typedef struct { char legacy[16]; u32 domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } Pci;
static int pci(D d, Pci *p) { memset(p, 0, sizeof *p); busid(d->i, p->busId); snprintf(p->legacy, 16, "%s", p->busId + 4); p->bus = 0x18 + d->i * 0x11; p->pciDeviceId = 0x233510de; return OK; }
X int nvmlDeviceGetPciInfo_v3(D d, Pci *p) { ENTER("nvmlDeviceGetPciInfo_v3", "pci"); return pci(d, p); }
X int nvmlDeviceGetPciInfo_v2(D d, Pci *p) { ENTER("nvmlDeviceGetPciInfo_v2", "pci"); return pci(d, p); }
X int nvmlDeviceGetPciInfo(D d, Pci *p) { ENTER("nvmlDeviceGetPciInfo", "pci"); return pci(d, p); }
typedef struct { u64 total, free, used; } Mem;
typedef struct { u32 version; u64 total, reserved, free, used; } Mem2;
static void odd(D d, u64 *used) { if (fault(d->i, "mem_max", 0)) *used = ~0ull; if (fault(d->i, "used_over", 0)) *used = 2 * tot(d); }
X int nvmlDeviceGetMemoryInfo(D d, Mem *m) {
  ENTER("nvmlDeviceGetMemoryInfo", "memory_info");
  u64 t = tot(d), r = t ? reserved(d) : 0, u = t ? (u64)((t - r) * memfrac(d->i)) : 0;
  m->total = t; m->used = u + r; m->free = t - r - u; odd(d, &m->used); return OK; /* v1 counts the reserved memory as used */
}
#ifndef OLD_DRIVER
X int nvmlDeviceGetMemoryInfo_v2(D d, Mem2 *m) {
  ENTER("nvmlDeviceGetMemoryInfo_v2", "memory_info");
  if (m->version != (sizeof(Mem2) | 2u << 24)) return VERMISMATCH;
  u64 t = tot(d), r = t ? reserved(d) : 0, u = t ? (u64)((t - r) * memfrac(d->i)) : 0;
  m->total = t; m->reserved = r; m->used = u; m->free = t - r - u; odd(d, &m->used); return OK;
}
#endif
X int nvmlDeviceGetBAR1MemoryInfo(D d, Mem *m) { ENTER("nvmlDeviceGetBAR1MemoryInfo", "bar1"); m->total = 256ull << 30; m->free = 255ull << 30; m->used = 1ull << 30; return OK; }
X int nvmlDeviceGetUtilizationRates(D d, u32 *u) {
  ENTER("nvmlDeviceGetUtilizationRates", "util");
  if (d->mig >= 0 || fault(d->i, "mig", 0)) return NOTSUP;
  u[0] = util(d->i); u[1] = (u32)(util(d->i) * 0.6); return OK;
}
X int nvmlDeviceGetTemperature(D d, u32 s, u32 *t) { ENTER("nvmlDeviceGetTemperature", "temp"); if (s) return INVAL; *t = temp(d->i); return OK; }
#ifndef OLD_DRIVER
typedef struct { u32 version, sensor; int t; } TempV;
X int nvmlDeviceGetTemperatureV(D d, TempV *t) { ENTER("nvmlDeviceGetTemperatureV", "temp"); if (t->version != (sizeof(TempV) | 1u << 24)) return VERMISMATCH; if (t->sensor) return INVAL; t->t = temp(d->i); return OK; }
#endif
X int nvmlDeviceGetTemperatureThreshold(D d, u32 k, u32 *t) { ENTER("nvmlDeviceGetTemperatureThreshold", "temp"); static const u32 v[] = {95, 92, 95, 87}; if (k > 3) return NOTSUP; *t = v[k]; return OK; }
X int nvmlDeviceGetPowerUsage(D d, u32 *p) { ENTER("nvmlDeviceGetPowerUsage", "power"); *p = power_mw(d->i); return OK; }
static u32 limit_mw(int g) { return fault(g, "u32max", 0) ? ~0u : fault(g, "plim0", 0) ? 0 : 700000; }
X int nvmlDeviceGetEnforcedPowerLimit(D d, u32 *p) { ENTER("nvmlDeviceGetEnforcedPowerLimit", "power_limit"); *p = limit_mw(d->i); return OK; }
X int nvmlDeviceGetPowerManagementLimit(D d, u32 *p) { ENTER("nvmlDeviceGetPowerManagementLimit", "power_limit"); *p = limit_mw(d->i); return OK; }
X int nvmlDeviceGetPowerManagementDefaultLimit(D d, u32 *p) { ENTER("nvmlDeviceGetPowerManagementDefaultLimit", "power_limit"); *p = 700000; return OK; }
X int nvmlDeviceGetPowerManagementLimitConstraints(D d, u32 *a, u32 *b) { ENTER("nvmlDeviceGetPowerManagementLimitConstraints", "power_limit"); *a = 200000; *b = 700000; return OK; }
X int nvmlDeviceGetTotalEnergyConsumption(D d, u64 *e) { ENTER("nvmlDeviceGetTotalEnergyConsumption", "energy"); *e = (u64)(wall() * 1000) * 300; return OK; }
X int nvmlDeviceGetFanSpeed(D d, u32 *s) { ENTER("nvmlDeviceGetFanSpeed", "fan"); *s = fault(d->i, "u32max", 0) ? ~0u : fault(d->i, "fan_hi", 0) ? 140 : 30 + (u32)(50 * wave(d->i, 90, 0)); return OK; }
X int nvmlDeviceGetFanSpeed_v2(D d, u32 f, u32 *s) { (void)f; return nvmlDeviceGetFanSpeed(d, s); }
X int nvmlDeviceGetNumFans(D d, u32 *n) { ENTER("nvmlDeviceGetNumFans", "fan"); *n = 1; return OK; }
static u32 clk(int g, u32 t) { return t == 2 ? 3201 : t == 3 ? 1500 : 345 + (u32)(1635 * wave(g, 60, 0)) / 15 * 15; }
X int nvmlDeviceGetClockInfo(D d, u32 t, u32 *c) { ENTER("nvmlDeviceGetClockInfo", "clock"); if (t > 3) return INVAL; *c = clk(d->i, t); return OK; }
X int nvmlDeviceGetMaxClockInfo(D d, u32 t, u32 *c) { ENTER("nvmlDeviceGetMaxClockInfo", "max_clock"); if (t > 3) return INVAL; *c = t == 2 ? 3201 : 1980; return OK; }
X int nvmlDeviceGetPerformanceState(D d, u32 *s) { ENTER("nvmlDeviceGetPerformanceState", "pstate"); *s = 0; return OK; }
X int nvmlDeviceGetPersistenceMode(D d, u32 *s) { ENTER("nvmlDeviceGetPersistenceMode", "persistence"); *s = 1; return OK; }
X int nvmlDeviceGetComputeMode(D d, u32 *s) { ENTER("nvmlDeviceGetComputeMode", "compute_mode"); double v; *s = fault(d->i, "cmode", &v) ? (u32)v : 0; return OK; }
X int nvmlDeviceGetRemappedRows(D d, u32 *c, u32 *u, u32 *p, u32 *f) { ENTER("nvmlDeviceGetRemappedRows", "rows"); *p = fault(d->i, "pending", 0); *f = fault(d->i, "failed_rows", 0); *c = 0; *u = *p || *f; return OK; }
X int nvmlDeviceGetRetiredPagesPendingStatus(D d, u32 *s) { ENTER("nvmlDeviceGetRetiredPagesPendingStatus", "pages"); *s = fault(d->i, "pages", 0); return OK; }
X int nvmlDeviceGetDisplayActive(D d, u32 *s) { ENTER("nvmlDeviceGetDisplayActive", "display"); *s = 0; return OK; }
X int nvmlDeviceGetDisplayMode(D d, u32 *s) { ENTER("nvmlDeviceGetDisplayMode", "display"); *s = 0; return OK; }
X int nvmlDeviceGetDriverModel(D d, u32 *a, u32 *b) { (void)a; (void)b; ENTER("nvmlDeviceGetDriverModel", "driver_model"); return NOTSUP; }
#ifndef OLD_DRIVER
X int nvmlDeviceGetDriverModel_v2(D d, u32 *a, u32 *b) { (void)a; (void)b; ENTER("nvmlDeviceGetDriverModel_v2", "driver_model"); return NOTSUP; }
#endif
X int nvmlDeviceGetBrand(D d, u32 *s) { ENTER("nvmlDeviceGetBrand", 0); *s = 14; return OK; }
X int nvmlDeviceGetArchitecture(D d, u32 *s) { ENTER("nvmlDeviceGetArchitecture", 0); *s = 9; return OK; }
X int nvmlDeviceGetCudaComputeCapability(D d, int *a, int *b) { ENTER("nvmlDeviceGetCudaComputeCapability", "cc"); *a = 9; *b = 0; return OK; }
X int nvmlDeviceGetNumGpuCores(D d, u32 *n) { ENTER("nvmlDeviceGetNumGpuCores", "cores"); *n = 16896; return OK; }
X int nvmlDeviceGetMemoryBusWidth(D d, u32 *n) { ENTER("nvmlDeviceGetMemoryBusWidth", "bus"); *n = 6144; return OK; }
/* MIG */
X int nvmlDeviceGetMigMode(D d, u32 *c, u32 *p) { ENTER("nvmlDeviceGetMigMode", "mig"); *c = *p = fault(d->i, "mig", 0); return OK; }
X int nvmlDeviceGetMaxMigDeviceCount(D d, u32 *n) { ENTER("nvmlDeviceGetMaxMigDeviceCount", "mig"); *n = fault(d->i, "mig", 0) ? 7 : 0; return OK; }
X int nvmlDeviceGetMigDeviceHandleByIndex(D d, u32 i, D *o) { ENTER("nvmlDeviceGetMigDeviceHandleByIndex", "mig"); if (!fault(d->i, "mig", 0)) return NOTSUP; if (i >= n_slices(d->i)) return NOTFOUND; *o = &migs[d->i][i]; return OK; }
X int nvmlDeviceIsMigDeviceHandle(D d, u32 *o) { ENTER("nvmlDeviceIsMigDeviceHandle", 0); *o = d->mig >= 0; return OK; }
X int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(D d, D *o) { ENTER("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", 0); *o = &gpus[d->i]; return OK; }
X int nvmlDeviceGetGpuInstanceId(D d, u32 *o) { ENTER("nvmlDeviceGetGpuInstanceId", "mig"); if (d->mig < 0) return NOTSUP; *o = 1 + d->mig; return OK; }
X int nvmlDeviceGetComputeInstanceId(D d, u32 *o) { ENTER("nvmlDeviceGetComputeInstanceId", "mig"); if (d->mig < 0) return NOTSUP; *o = 0; return OK; }
/* processes: v2 and v3 share one 24-byte struct on drivers >= 535.98 */
typedef struct { u32 pid; u64 used; } P1;
typedef struct { u32 pid; u64 used; u32 gi, ci; } P2;
static int procs_of(D d, int want_g, P2 *out, int cap) {
  int n = 0; double v;
  int graphics = fault(d->i, "graphics", 0);
  if (want_g ? !graphics && !fault(d->i, "both_lists", 0) : graphics) return 0;
  if (fault(d->i, "bad_pids", 0)) { out[n++] = (P2){0, 0, ~0u, ~0u}; out[n++] = (P2){~0u, 0, ~0u, ~0u}; }
  if (fault(d->i, "dead_pids", 0)) { for (int k = 0; k < 2 && n < cap; k++, n++) out[n] = (P2){3999990 + k + 10 * d->i, pid_mib << 20, ~0u, ~0u}; return n; }
  if (fault(d->i, "many_procs", &v)) { for (int k = 0; k < (int)v && n < cap && npid; k++, n++) out[n] = (P2){pids[k % npid], pid_mib << 20, ~0u, ~0u}; }
  else for (int k = 0; k < npid; k++) if (ngpu && k % ngpu == d->i && (d->mig < 0 || k / ngpu % (int)n_slices(d->i) == d->mig) && n < cap) out[n++] = (P2){pids[k], pid_mib << 20, ~0u, ~0u};
  if (fault(d->i, "procs_na", 0)) for (int k = 0; k < n; k++) out[k].used = ~0ull;
  return n;
}
static int get_procs(D d, int g, u32 *cnt, void *buf, int v1) {
  P2 tmp[512];
  int n = procs_of(d, g, tmp, 512);
  if (*cnt < (u32)n || (!buf && n)) { *cnt = n; return INSUFF; }
  *cnt = n;
  for (int k = 0; k < n; k++) { if (v1) { ((P1 *)buf)[k].pid = tmp[k].pid; ((P1 *)buf)[k].used = tmp[k].used; } else ((P2 *)buf)[k] = tmp[k]; }
  return OK;
}
X int nvmlDeviceGetComputeRunningProcesses(D d, u32 *c, void *b) { ENTER("nvmlDeviceGetComputeRunningProcesses", "procs"); return get_procs(d, 0, c, b, 1); }
X int nvmlDeviceGetGraphicsRunningProcesses(D d, u32 *c, void *b) { ENTER("nvmlDeviceGetGraphicsRunningProcesses", "gprocs"); return get_procs(d, 1, c, b, 1); }
X int nvmlDeviceGetComputeRunningProcesses_v2(D d, u32 *c, void *b) { ENTER("nvmlDeviceGetComputeRunningProcesses_v2", "procs"); return get_procs(d, 0, c, b, 0); }
X int nvmlDeviceGetGraphicsRunningProcesses_v2(D d, u32 *c, void *b) { ENTER("nvmlDeviceGetGraphicsRunningProcesses_v2", "gprocs"); return get_procs(d, 1, c, b, 0); }
#ifndef OLD_DRIVER
X int nvmlDeviceGetComputeRunningProcesses_v3(D d, u32 *c, void *b) { ENTER("nvmlDeviceGetComputeRunningProcesses_v3", "procs"); return get_procs(d, 0, c, b, 0); }
X int nvmlDeviceGetGraphicsRunningProcesses_v3(D d, u32 *c, void *b) { ENTER("nvmlDeviceGetGraphicsRunningProcesses_v3", "gprocs"); return get_procs(d, 1, c, b, 0); }
X int nvmlDeviceGetMPSComputeRunningProcesses_v3(D d, u32 *c, void *b) { ENTER("nvmlDeviceGetMPSComputeRunningProcesses_v3", "gprocs"); return get_procs(d, 1, c, b, 0); }
/* present on drivers >= 535.104.05; nvitop uses its presence to choose the v2 process struct */
X int nvmlDeviceGetConfComputeMemSizeInfo(D d, void *p) { (void)p; ENTER("nvmlDeviceGetConfComputeMemSizeInfo", 0); return NOTSUP; }
X int nvmlDeviceGetRunningProcessDetailList(D d, void *p) { (void)p; ENTER("nvmlDeviceGetRunningProcessDetailList", 0); return NOTSUP; }
#endif
typedef struct { u32 pid; u64 ts; u32 sm, mem, enc, dec; } Sample;
X int nvmlDeviceGetProcessUtilization(D d, Sample *s, u32 *c, u64 since) {
  (void)since;
  ENTER("nvmlDeviceGetProcessUtilization", "procutil");
  P2 tmp[512];
  double enc = 0, dec = 0;
  int n = procs_of(d, fault(d->i, "graphics", 0), tmp, 512);
  fault(d->i, "enc", &enc); fault(d->i, "dec", &dec);
  if (!n) { *c = 0; return NOTFOUND; }
  if (!s || *c < (u32)n) { *c = n < 100 ? 100 : n; return INSUFF; }
  *c = n;
  for (int k = 0; k < n; k++) s[k] = (Sample){tmp[k].pid, (u64)(wall() * 1e6), util(d->i) / n, util(d->i) / n / 2, (u32)enc, (u32)dec};
  return OK;
}
X int nvmlDeviceGetPcieThroughput(D d, u32 k, u32 *v) { ENTER("nvmlDeviceGetPcieThroughput", "pcie"); *v = (u32)((k ? 900000 : 250000) * wave(d->i, 30, k)); return OK; }
X int nvmlDeviceGetCurrPcieLinkGeneration(D d, u32 *v) { ENTER("nvmlDeviceGetCurrPcieLinkGeneration", "pcielink"); *v = 5; return OK; }
X int nvmlDeviceGetMaxPcieLinkGeneration(D d, u32 *v) { ENTER("nvmlDeviceGetMaxPcieLinkGeneration", "pcielink"); *v = 5; return OK; }
X int nvmlDeviceGetCurrPcieLinkWidth(D d, u32 *v) { ENTER("nvmlDeviceGetCurrPcieLinkWidth", "pcielink"); *v = 16; return OK; }
X int nvmlDeviceGetMaxPcieLinkWidth(D d, u32 *v) { ENTER("nvmlDeviceGetMaxPcieLinkWidth", "pcielink"); *v = 16; return OK; }
X int nvmlDeviceGetPcieReplayCounter(D d, u32 *v) { ENTER("nvmlDeviceGetPcieReplayCounter", "pcielink"); *v = 0; return OK; }
X int nvmlDeviceGetEncoderUtilization(D d, u32 *u, u32 *p) { ENTER("nvmlDeviceGetEncoderUtilization", "codec"); *u = 0; *p = 100000; return OK; }
X int nvmlDeviceGetDecoderUtilization(D d, u32 *u, u32 *p) { ENTER("nvmlDeviceGetDecoderUtilization", "codec"); *u = 0; *p = 100000; return OK; }
X int nvmlDeviceGetTotalEccErrors(D d, u32 t, u32 k, u64 *v) { (void)t; (void)k; ENTER("nvmlDeviceGetTotalEccErrors", "ecc"); double e = 0; fault(d->i, "ecc", &e); *v = (u64)e; return OK; }
X int nvmlDeviceGetMemoryErrorCounter(D d, u32 t, u32 k, u32 l, u64 *v) { (void)l; return nvmlDeviceGetTotalEccErrors(d, t, k, v); }
X int nvmlDeviceGetEccMode(D d, u32 *a, u32 *b) { ENTER("nvmlDeviceGetEccMode", "ecc"); *a = *b = 1; return OK; }
static int thr(D d, u64 *v) { double bits; if (fault(d->i, "thr", &bits)) { *v = (u64)bits; return OK; } double w = wave(d->i, 60, 0); *v = fault(d->i, "throttle_on", 0) ? 0x40 | 0x8 : w < 0.05 ? 1 : w > 0.97 ? 4 : 0; return OK; }
X int nvmlDeviceGetCurrentClocksThrottleReasons(D d, u64 *v) { ENTER("nvmlDeviceGetCurrentClocksThrottleReasons", "throttle"); return thr(d, v); }
X int nvmlDeviceGetSupportedClocksThrottleReasons(D d, u64 *v) { ENTER("nvmlDeviceGetSupportedClocksThrottleReasons", "throttle"); *v = 0x1ff; return OK; }
#ifndef OLD_DRIVER
X int nvmlDeviceGetCurrentClocksEventReasons(D d, u64 *v) { ENTER("nvmlDeviceGetCurrentClocksEventReasons", "throttle"); return thr(d, v); }
X int nvmlDeviceGetSupportedClocksEventReasons(D d, u64 *v) { ENTER("nvmlDeviceGetSupportedClocksEventReasons", "throttle"); *v = 0x1ff; return OK; }
#endif
typedef struct { u64 ref, viol; } Viol;
X int nvmlDeviceGetViolationStatus(D d, u32 k, Viol *v) { (void)k; ENTER("nvmlDeviceGetViolationStatus", "violation"); v->ref = (u64)(wall() * 1e6); v->viol = 0; return OK; }
X int nvmlDeviceGetNvLinkState(D d, u32 l, u32 *s) { ENTER("nvmlDeviceGetNvLinkState", "nvlink"); if (l >= 18) return INVAL; *s = 1; return OK; }
X int nvmlDeviceGetNvLinkVersion(D d, u32 l, u32 *s) { ENTER("nvmlDeviceGetNvLinkVersion", "nvlink"); if (l >= 18) return INVAL; *s = 4; return OK; }
X int nvmlDeviceGetTopologyCommonAncestor(D d, D e, u32 *s) { (void)e; double v; ENTER("nvmlDeviceGetTopologyCommonAncestor", "topo"); *s = fault(d->i, "topo", &v) ? (u32)v : 50; return OK; }
X int nvmlDeviceGetP2PStatus(D d, D e, u32 k, u32 *s) { (void)e; double v; ENTER("nvmlDeviceGetP2PStatus", k == 2 ? "nvlink" : "p2p"); *s = k != 2 && fault(d->i, "p2p", &v) ? (u32)v : 0; return OK; }
X int nvmlDeviceGetCpuAffinity(D d, u32 n, unsigned long *m) { ENTER("nvmlDeviceGetCpuAffinity", 0); memset(m, 0, n * sizeof *m); if (n) m[0] = 0xff; return OK; }
/* the driver's own sample buffers: 100 samples, 6 per second (a client can fill its history with them at start-up) */
typedef struct { u64 ts; union { double d; u32 u; u64 l; } v; } Samp;
X int nvmlDeviceGetSamples(D d, u32 type, u64 since, u32 *vt, u32 *cnt, Samp *s) {
  ENTER("nvmlDeviceGetSamples", "samples");
  if (type > 6) return NOTSUP;
  *vt = 1;
  if (!s) { *cnt = 120; return OK; }
  u32 n = 0;
  double step = 1 / 6.0, t1 = floor(wall() / step) * step;
  for (int k = 99; k >= 0 && n < *cnt; k--) {
    double t = t1 - k * step, w = 0.5 + 0.5 * sin(2 * M_PI * (t - t_origin) / 60 + d->i * 0.8);
    if ((u64)(t * 1e6) <= since) continue;
    s[n].ts = (u64)(t * 1e6); s[n].v.l = 0;
    s[n++].v.u = type == 0 ? 78000 + (u32)(610000 * w) : type == 1 ? (u32)(5 + 93 * w) : type == 2 ? (u32)(3 + 56 * w) : type == 5 ? 345 + (u32)(1635 * w) : type == 6 ? 3201 : 0;
  }
  *cnt = n;
  return n ? OK : NOTFOUND;
}
typedef struct { u32 fieldId, scopeId; long long ts, lat; u32 type; int ret; union { double d; u32 u; u64 l; } v; } FV;
X int nvmlDeviceGetFieldValues(D d, int n, FV *f) {
  ENTER("nvmlDeviceGetFieldValues", "fields");
  for (int k = 0; k < n; k++) {
    f[k].ts = (long long)(wall() * 1e6); f[k].lat = 0; f[k].ret = OK; f[k].type = 3;
    switch (f[k].fieldId) {
      case 91: f[k].type = 1; f[k].v.u = 18; break;                                     /* NVLINK_LINK_COUNT */
      case 138: case 139: case 140: case 141: f[k].v.l = (u64)(wall() * 1e6 * (f[k].scopeId == ~0u ? 18 : 1)); break; /* NVLINK_THROUGHPUT KiB */
      case 82: f[k].type = 1; f[k].v.u = temp(d->i) + 8; break;                         /* MEMORY_TEMP */
      case 186: case 185: f[k].type = 1; f[k].v.u = power_mw(d->i); break;              /* POWER_INSTANT / AVERAGE */
      case 230: {                                                                       /* GET_GPU_RECOVERY_ACTION */
        double action, type = 1;
        if (!fault(d->i, "recovery", &action)) { f[k].ret = NOTSUP; break; }
        fault(d->i, "recovery_type", &type);
        f[k].type = (u32)type; f[k].v.l = (u64)action;
        break;
      }
      default: f[k].ret = NOTSUP;
    }
  }
  return OK;
}
#ifndef OLD_DRIVER
/* activity counters: a sample is a point in time, and a metric is the utilisation divided by the metric's id */
typedef struct { int i; double t; } Gpm;
typedef struct { u32 id; int ret; double v; const char *s, *l, *u; } GpmMetric;
typedef struct { u32 version, n; Gpm *a, *b; GpmMetric m[]; } GpmGet;
typedef struct { u32 version, on; } GpmSupport;
X int nvmlGpmQueryDeviceSupport(D d, GpmSupport *s) { double v; ENTER("nvmlGpmQueryDeviceSupport", "gpm"); s->on = !fault(d->i, "old_gpm", &v); return OK; }
X int nvmlGpmSampleAlloc(Gpm **s) { CNT("nvmlGpmSampleAlloc"); return (*s = calloc(1, sizeof **s)) ? OK : UNKNOWN; }
X int nvmlGpmSampleFree(Gpm *s) { CNT("nvmlGpmSampleFree"); free(s); return OK; }
X int nvmlGpmSampleGet(D d, Gpm *s) { ENTER("nvmlGpmSampleGet", "gpm"); *s = (Gpm){d->i, wall()}; return OK; }
X int nvmlGpmMetricsGet(GpmGet *g) {
  CNT("nvmlGpmMetricsGet");
  if (g->version != 1 || !g->a || !g->b || g->b->t < g->a->t) return INVAL;
  for (u32 k = 0; k < g->n; k++) {
    u32 id = g->m[k].id;
    g->m[k].ret = id == 2 || id == 3 || id == 5 || id == 10 ? OK : NOTSUP;
    g->m[k].v = util(g->b->i) / (double)id;
  }
  return OK;
}
#endif
/* Xid errors: an event set holds the GPUs that it listens to, and the GPUs whose error it has already reported */
typedef struct { u64 cards, told; } Events;
typedef struct { D d; u64 type, data; u32 gi, ci; } Event;
X int nvmlEventSetCreate(Events **s) { CNT("nvmlEventSetCreate"); return (*s = calloc(1, sizeof **s)) ? OK : UNKNOWN; }
X int nvmlEventSetFree(Events *s) { CNT("nvmlEventSetFree"); free(s); return OK; }
X int nvmlDeviceRegisterEvents(D d, u64 types, Events *s) { ENTER("nvmlDeviceRegisterEvents", "events"); if (types != 8) return NOTSUP; s->cards |= 1ull << d->i; return OK; }
X int nvmlEventSetWait_v2(Events *s, Event *e, u32 ms) {
  CNT("nvmlEventSetWait_v2");
  double v;
  for (int g = 0; g < ngpu; g++)
    if ((s->cards >> g & 1) && !(s->told >> g & 1) && fault(g, "xid", &v)) {
      s->told |= 1ull << g;
      *e = (Event){&gpus[g], 8, (u64)v, ~0u, ~0u};
      return OK;
    }
  zzz(ms * 1000L);
  return TIMEOUT;
}
