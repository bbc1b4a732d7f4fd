/* For LD_PRELOAD: the file $STEPS sets the wall clock of a process. It has a line `AT SECONDS` for each step: from the
 * true time AT on, the clock is SECONDS ahead. The times of files that were changed since then are ahead by as much, as
 * if the whole machine's clock had been set. Clocks that count from boot are unaffected. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define MOST 4096
static const char *steps;

__attribute__((constructor)) static void open_steps(void) {
    const char *path = getenv("STEPS");
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, MOST, PROT_READ, MAP_SHARED, file, 0);
    steps = mapped == MAP_FAILED ? NULL : mapped;
    close(file);
}

/* The file is MOST bytes long, with NULs after its lines, and is changed in place. */
static long ahead(time_t at) {
    long seconds = 0, from, then;
    int used;
    for (const char *line = steps; line && sscanf(line, "%ld %ld\n%n", &from, &then, &used) == 2; line += used)
        if (at >= from) seconds = then;
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int done = (int)syscall(SYS_clock_gettime, clock, now);
    if (!done && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead(now->tv_sec);
    return done;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    int done = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return done;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}

static int shifted(int done, struct stat *about) {
    if (!done) {
        about->st_mtim.tv_sec += ahead(about->st_mtim.tv_sec);
        about->st_ctim.tv_sec += ahead(about->st_ctim.tv_sec);
    }
    return done;
}

int stat(const char *restrict path, struct stat *restrict about) {
    return shifted((int)syscall(SYS_newfstatat, AT_FDCWD, path, about, 0), about);
}
int lstat(const char *restrict path, struct stat *restrict about) {
    return shifted((int)syscall(SYS_newfstatat, AT_FDCWD, path, about, AT_SYMLINK_NOFOLLOW), about);
}
int fstat(int file, struct stat *about) { return shifted((int)syscall(SYS_fstat, file, about), about); }
int fstatat(int folder, const char *restrict path, struct stat *restrict about, int flags) {
    return shifted((int)syscall(SYS_newfstatat, folder, path, about, flags), about);
}
int stat64(const char *restrict path, struct stat64 *restrict about) { return stat(path, (struct stat *)about); }
int lstat64(const char *restrict path, struct stat64 *restrict about) { return lstat(path, (struct stat *)about); }
int fstat64(int file, struct stat64 *about) { return fstat(file, (struct stat *)about); }
int fstatat64(int folder, const char *restrict path, struct stat64 *restrict about, int flags) {
    return fstatat(folder, path, (struct stat *)about, flags);
}
