/*
 * A library that replaces AMD's libamd_smi.so for amdsmi 7.0, with the structures that this module declares.
 *
 * Environment variables describe the machine. They are read on every call, so a test can change them at any time:
 *   FAKE_AMD_SMI_GPUS=2          the number of GPUs
 *   FAKE_AMD_SMI_INIT=34         the status that amdsmi_init returns
 *   FAKE_AMD_SMI_DRIVER=1        how many times the driver has been loaded, or 0 while it is not loaded;
 *                                loading it again invalidates all handles
 *   FAKE_AMD_SMI_NAME=...        the name of the GPUs
 *   FAKE_AMD_SMI_PIDS=12,34      PIDs of 60 GiB processes, the n-th on the n-th GPU; a GPU with PID 0 or none is idle
 *   FAKE_AMD_SMI_FAULTS=1:power=10,0:temp=na
 *       what a field of a GPU returns instead of its value: a status, or "na" for all bits set; with "hang", the call
 *       never returns. The field "all" stands for every field. Fields: asic, busy, memory, edge, junction, power, cap,
 *       processes, clock, fan, metrics, energy, partition, serial (as text), pcie, ecc, driver, bdf, violation.
 * The build adds stubs for all other functions that the module looks up by name; they return "not supported".
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SUCCESS 0
#define NOT_SUPPORTED 2
#define NOT_FOUND 31
#define NOT_INITIALISED 32
#define DRIVER_NOT_LOADED 34
#define MOST 16
#define GIB (1ull << 30)

typedef void *handle_t;

static char cards[MOST];

static int setting(const char *name, int otherwise)
{
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}

/* How many times the driver had been loaded at amdsmi_init; 0 before amdsmi_init and after amdsmi_shut_down. */
static int opened;
static int driver(void) { return setting("FAKE_AMD_SMI_DRIVER", 1); }

static int index_of(handle_t handle) { return (int)((char *)handle - cards); }

/* Return the PID of the process on a GPU, or 0 if there is none. */
static int pid_on(int index)
{
    char copy[1024], *rest = copy, *each;
    const char *pids = getenv("FAKE_AMD_SMI_PIDS");
    snprintf(copy, sizeof copy, "%s", pids ? pids : "");
    for (int i = 0; (each = strsep(&rest, ",")); i++)
        if (i == index)
            return atoi(each);
    return 0;
}

/* Return the fault set for a GPU's field, or NULL if there is none; the string lasts until the thread's next call. */
static const char *fault(int index, const char *field)
{
    static __thread char word[32];
    char copy[4096], *rest = copy;
    const char *faults = getenv("FAKE_AMD_SMI_FAULTS");
    snprintf(copy, sizeof copy, "%s", faults ? faults : "");
    for (char *each; (each = strsep(&rest, ","));) {
        int card;
        char name[32];
        if (sscanf(each, "%d:%31[^=]=%31s", &card, name, word) == 3 && card == index
            && (!strcmp(name, field) || !strcmp(name, "all")))
            return word;
    }
    return NULL;
}

/* Return whether a field has all bits set, which means "not supported"; store the status of the call in *status. */
static bool is_na(handle_t handle, const char *field, int *status)
{
    const char *word = fault(index_of(handle), field);
    bool is_gone = opened != driver() || index_of(handle) >= setting("FAKE_AMD_SMI_GPUS", 2);
    *status = !opened ? NOT_INITIALISED : !driver() ? DRIVER_NOT_LOADED : is_gone ? NOT_FOUND : SUCCESS;
    if (!word || *status)
        return false;
    if (!strcmp(word, "hang"))
        pause();
    if (!strcmp(word, "na"))
        return true;
    *status = atoi(word);
    return false;
}

#define ANSWER(field)                                                                                                  \
    int status;                                                                                                        \
    bool na = is_na(handle, field, &status);                                                                           \
    (void)na;                                                                                                          \
    if (status)                                                                                                        \
        return status;

/* As in the real library, a second amdsmi_init does nothing, and one amdsmi_shut_down undoes all amdsmi_init calls. */
int amdsmi_init(uint64_t flags)
{
    int status = setting("FAKE_AMD_SMI_INIT", driver() ? SUCCESS : DRIVER_NOT_LOADED);
    if (!opened && !status)
        opened = driver();
    return status;
}

int amdsmi_shut_down(void)
{
    opened = 0;
    return SUCCESS;
}

int amdsmi_get_socket_handles(uint32_t *count, handle_t *sockets)
{
    int n = setting("FAKE_AMD_SMI_GPUS", 2);
    for (int i = 0; sockets && i < n; i++)
        sockets[i] = &cards[i];
    *count = n;
    return SUCCESS;
}

int amdsmi_get_processor_handles(handle_t socket, uint32_t *count, handle_t *processors)
{
    if (processors)
        processors[0] = socket;
    *count = 1;
    return SUCCESS;
}

struct asic {
    char market_name[256];
    uint32_t vendor_id;
    char vendor_name[256];
    uint32_t subvendor_id;
    uint64_t device_id;
    uint32_t rev_id;
    char asic_serial[256];
    uint32_t oam_id, compute_units;
    uint64_t graphics_version;
    uint32_t subsystem_id, reserved[21];
};

int amdsmi_get_gpu_asic_info(handle_t handle, struct asic *info)
{
    ANSWER("asic")
    const char *name = getenv("FAKE_AMD_SMI_NAME");
    memset(info, 0, sizeof *info);
    snprintf(info->market_name, sizeof info->market_name, "%s", name ? name : "AMD Instinct MI300X");
    info->vendor_id = 0x1002;
    info->device_id = 0x74a1;
    if (!na)
        snprintf(info->asic_serial, sizeof info->asic_serial, "0x9F3A5C00D1E2F0%02X", 0xA0 + index_of(handle));
    const char *serial = fault(index_of(handle), "serial");
    if (serial && !strncmp(serial, "0x", 2))
        snprintf(info->asic_serial, sizeof info->asic_serial, "%s", serial);
    info->compute_units = 304;
    info->graphics_version = 0x942;
    return SUCCESS;
}

struct usage { uint32_t gfx, umc, mm, reserved[13]; };

int amdsmi_get_gpu_activity(handle_t handle, struct usage *usage)
{
    ANSWER("busy")
    *usage = (struct usage){na ? 0xFFFF : pid_on(index_of(handle)) ? 42 : 0, 17, 0xFFFF};
    return SUCCESS;
}

struct vram { uint32_t total_mib, used_mib, reserved[2]; };

int amdsmi_get_gpu_vram_usage(handle_t handle, struct vram *vram)
{
    ANSWER("memory")
    *vram = (struct vram){196592, na ? 0xFFFFFFFF : 283 + (pid_on(index_of(handle)) ? 60 * 1024 : 0)};
    return SUCCESS;
}

int amdsmi_get_temp_metric(handle_t handle, int place, int metric, int64_t *celsius)
{
    ANSWER(place == 0 ? "edge" : "junction")
    if (place > 1)
        return NOT_SUPPORTED;
    *celsius = metric == 0 ? (place == 0 ? 51 : 58) : 100;
    return SUCCESS;
}

struct power {
    uint64_t socket;
    uint32_t current, average;
    uint64_t voltages[3];
    uint32_t limit, padding;
    uint64_t reserved[18];
};

int amdsmi_get_power_info(handle_t handle, struct power *power)
{
    ANSWER("power")
    *power = (struct power){na ? 0xFFFF : 413, na ? 0xFFFF : 413, 0xFFFF, {0}, 750};
    return SUCCESS;
}

struct cap { uint64_t cap, usual, dpm, least, most, reserved[3]; };

int amdsmi_get_power_cap_info(handle_t handle, uint32_t sensor, struct cap *cap)
{
    ANSWER("cap")
    *cap = (struct cap){750000000, 750000000, 2100, 0, 750000000};
    return SUCCESS;
}

struct process {
    char name[256];
    uint32_t pid, padding;
    uint64_t memory;
    struct { uint64_t gfx, enc; uint32_t reserved[12]; } engines;
    struct { uint64_t gtt, cpu, vram; uint32_t reserved[10]; } memories;
    char container[256];
    uint32_t occupancy, reserved[11];
};

int amdsmi_get_gpu_process_list(handle_t handle, uint32_t *count, struct process *list)
{
    ANSWER("processes")
    int pid = pid_on(index_of(handle));
    *count = pid != 0;
    if (pid) {
        memset(list, 0, sizeof *list);
        list->pid = pid;
        list->memory = list->memories.vram = 60 * GIB;
        list->occupancy = 0xFFFFFFFF;
    }
    return SUCCESS;
}

struct clock { uint32_t now, least, most; uint8_t locked, sleeps; uint32_t reserved[4]; };

int amdsmi_get_clock_info(handle_t handle, int kind, struct clock *clock)
{
    ANSWER("clock")
    *clock = kind == 4 ? (struct clock){1300, 900, 1300} : (struct clock){na ? 0xFFFFFFFF : 1987, 132, 2100};
    return SUCCESS;
}

int amdsmi_get_gpu_fan_speed(handle_t handle, uint32_t sensor, int64_t *speed)
{
    ANSWER("fan")
    *speed = 102;
    return SUCCESS;
}

/* The module allocates the whole table; this declares only its start, up to the field that is needed. */
struct metrics { uint8_t before[112]; uint64_t throttled; };

int amdsmi_get_gpu_metrics_info(handle_t handle, uint8_t *metrics)
{
    ANSWER("metrics")
    struct metrics *table = (struct metrics *)metrics;
    memset(table->before, 0xFF, sizeof table->before);
    table->throttled = na ? UINT64_MAX : index_of(handle) == 1 ? 1 : 0;
    return SUCCESS;
}

int amdsmi_get_energy_count(handle_t handle, uint64_t *count, float *microjoules, uint64_t *timestamp)
{
    ANSWER("energy")
    *count = 2000000000;
    *microjoules = 15.259f;
    *timestamp = 1;
    return SUCCESS;
}

int amdsmi_get_gpu_compute_partition(handle_t handle, char *mode, uint32_t length)
{
    const char *word = fault(index_of(handle), "partition");
    snprintf(mode, length, "%s", word ? word : "SPX");
    return SUCCESS;
}

struct pcie {
    struct {
        uint16_t width;
        uint32_t speed, version;
        int slot;
        uint32_t most_version;
        uint64_t reserved[9];
    } most;
    struct {
        uint16_t width;
        uint32_t speed, bandwidth;
        uint64_t counts[5];
        uint32_t recoveries;
        uint64_t reserved[12];
    } now;
    uint64_t reserved[32];
};

int amdsmi_get_pcie_info(handle_t handle, struct pcie *pcie)
{
    ANSWER("pcie")
    memset(pcie, 0, sizeof *pcie);
    pcie->most.width = pcie->now.width = 16;
    pcie->most.speed = 32000;
    pcie->now.speed = 16000;
    return SUCCESS;
}

struct errors { uint64_t corrected, uncorrected, deferred, reserved[5]; };

int amdsmi_get_gpu_total_ecc_count(handle_t handle, struct errors *errors)
{
    ANSWER("ecc")
    *errors = (struct errors){3, 0, 0};
    return SUCCESS;
}

struct driver { char version[256], date[256], name[256]; };

int amdsmi_get_gpu_driver_info(handle_t handle, struct driver *driver)
{
    ANSWER("driver")
    memset(driver, 0, sizeof *driver);
    snprintf(driver->version, sizeof driver->version, "6.12.12");
    snprintf(driver->name, sizeof driver->name, "amdgpu");
    return SUCCESS;
}

int amdsmi_get_gpu_device_bdf(handle_t handle, uint64_t *bdf)
{
    ANSWER("bdf")
    *bdf = (uint64_t)(0x0c + 0x20 * index_of(handle)) << 8;
    return SUCCESS;
}

int amdsmi_topo_get_link_type(handle_t one, handle_t other, uint64_t *hops, uint32_t *type)
{
    *hops = 1;
    *type = 2;
    return SUCCESS;
}

int amdsmi_is_P2P_accessible(handle_t one, handle_t other, bool *accessible)
{
    *accessible = true;
    return SUCCESS;
}
