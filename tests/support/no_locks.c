/* For LD_PRELOAD: every attempt to lock a file fails, as on an NFS mount whose lock service does not answer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>

typedef int (*fcntl_call)(int, int, ...);

static int without_locks(const char *name, int descriptor, int command, void *argument) {
    if (command == F_SETLK || command == F_SETLKW || command == F_GETLK) {
        errno = ENOLCK;
        return -1;
    }
    return ((fcntl_call)dlsym(RTLD_NEXT, name))(descriptor, command, argument);
}

#define REPLACE(name)                                       \
    int name(int descriptor, int command, ...) {            \
        va_list arguments;                                  \
        va_start(arguments, command);                       \
        void *argument = va_arg(arguments, void *);         \
        va_end(arguments);                                  \
        return without_locks(#name, descriptor, command, argument); \
    }

REPLACE(fcntl)
REPLACE(fcntl64)

int flock(int descriptor, int operation) {
    errno = ENOLCK;
    return -1;
}
