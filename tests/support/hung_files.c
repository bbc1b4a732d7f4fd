/* For LD_PRELOAD: while the file $HUNG_WHILE exists, every call on a file below one of the folders in $HUNG (separated
 * by ':') hangs, as it would on a file server that does not answer, or in the /proc folder of a process that holds its
 * own memory map. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *hung, *flag;

__attribute__((constructor)) static void settle(void) {
    hung = getenv("HUNG");
    flag = getenv("HUNG_WHILE");
}

static int hangs(void) { return flag && !syscall(SYS_faccessat, AT_FDCWD, flag, F_OK, 0); }

static int is_hung(const char *path) {
    for (const char *at = hung; at && *at;) {
        const char *end = strchrnul(at, ':');
        if (!strncmp(path, at, end - at)) return 1;
        at = *end ? end + 1 : end;
    }
    return 0;
}

static void wait_for_path(const char *path) {
    while (hangs() && is_hung(path)) usleep(20000);
}

static void wait_for_file(int file) {
    char link[40], path[PATH_MAX];
    if (!hangs()) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;
    wait_for_path(path);
}

static void wait_below(int folder, const char *path) {
    if (*path == '/' || folder == AT_FDCWD) wait_for_path(path);
    else wait_for_file(folder);
}

#define OPEN(name)                                                                      \
    int name(const char *path, int flags, ...) {                                        \
        va_list more;                                                                   \
        va_start(more, flags);                                                          \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;               \
        va_end(more);                                                                   \
        wait_for_path(path);                                                            \
        return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);                   \
    }
#define OPENAT(name)                                                                    \
    int name(int folder, const char *path, int flags, ...) {                            \
        va_list more;                                                                   \
        va_start(more, flags);                                                          \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;               \
        va_end(more);                                                                   \
        wait_below(folder, path);                                                       \
        return (int)syscall(SYS_openat, folder, path, flags, mode);                     \
    }
#define ON_FILE(type, name, parameters, ...)                                            \
    type name parameters {                                                              \
        wait_for_file(file);                                                            \
        return ((type(*) parameters)dlsym(RTLD_NEXT, #name))(__VA_ARGS__);              \
    }
#define ON_PATH(name)                                                                   \
    int name(const char *restrict path, struct stat *restrict about) {                  \
        wait_for_path(path);                                                            \
        return ((int (*)(const char *, struct stat *))dlsym(RTLD_NEXT, #name))(path, about); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
ON_FILE(ssize_t, read, (int file, void *into, size_t n), file, into, n)
ON_FILE(ssize_t, write, (int file, const void *from, size_t n), file, from, n)
ON_FILE(ssize_t, pread, (int file, void *into, size_t n, off_t at), file, into, n, at)
ON_FILE(ssize_t, pread64, (int file, void *into, size_t n, off_t at), file, into, n, at)
ON_FILE(ssize_t, pwrite, (int file, const void *from, size_t n, off_t at), file, from, n, at)
ON_FILE(ssize_t, pwrite64, (int file, const void *from, size_t n, off_t at), file, from, n, at)
ON_FILE(int, fsync, (int file), file)
ON_FILE(int, fdatasync, (int file), file)
ON_FILE(int, fstat, (int file, struct stat *about), file, about)
ON_PATH(stat)
ON_PATH(lstat)
int fstatat(int folder, const char *restrict path, struct stat *restrict about, int flags) {
    wait_below(folder, path);
    return (int)syscall(SYS_newfstatat, folder, path, about, flags);
}
