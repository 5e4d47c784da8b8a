/* Gives a process a full or a blocked disk, or makes it hang, whenever somebody else says so.

   cc -shared -fPIC -o bad_process.so bad_process.c
   LD_PRELOAD=.../bad_process.so BAD_PROCESS=<file that holds one `struct wish`> program

   Only files under `folder` are on the bad disk; pipes, sockets and everything else are left alone. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { WELL, FULL, BLOCKED };

struct wish { /* as arm_shim.py writes it */
    int32_t disk; /* one of the above */
    int32_t disk_pid; /* whose disk; 0 is everybody's */
    int32_t hang; /* not 0: who was told to hang goes on hanging */
    int32_t unused;
    char folder[1008];
};

static const int LONGEST_S = 30; /* nobody hangs for ever if the campaign is gone */
static volatile const struct wish *wish;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("BAD_PROCESS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *wish, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (page == MAP_FAILED) abort(); /* a disk that is never bad would prove nothing */
    wish = page;
}

static time_t now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec;
}

/* Spins without giving Python's lock away, if it is called through ctypes.PyDLL. */
void hang_with_the_lock(void) {
    time_t end_s = now_s() + LONGEST_S;
    while (wish->hang && now_s() < end_s) {
    }
}

int is_to_hang(void) { return wish->hang; }

static int is_under(const char *path) {
    size_t length = strlen((const char *)wish->folder);
    return length && !strncmp(path, (const char *)wish->folder, length);
}

static int is_bad(void) {
    return wish && wish->disk != WELL && (!wish->disk_pid || wish->disk_pid == getpid());
}

/* Waits while the disk is blocked; returns whether it is full then. */
static int refuses(void) {
    time_t end_s = now_s() + LONGEST_S;
    struct timespec pause = {0, 2000000};
    while (is_bad() && wish->disk == BLOCKED && now_s() < end_s) nanosleep(&pause, NULL);
    if (!is_bad() || wish->disk != FULL) return 0;
    errno = ENOSPC;
    return 1;
}

static int refuses_file(int file) {
    char link[64], path[4096];
    if (!is_bad()) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_under(path) && refuses();
}

static int refuses_path(const char *path) { return is_bad() && is_under(path) && refuses(); }

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name)

ssize_t write(int file, const void *octets, size_t count) {
    REAL(ssize_t, write, int, const void *, size_t);
    return refuses_file(file) ? -1 : real(file, octets, count);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    return refuses_file(file) ? -1 : real(file, parts, count);
}

#define PWRITE(name) \
    ssize_t name(int file, const void *octets, size_t count, off_t place) { \
        REAL(ssize_t, name, int, const void *, size_t, off_t); \
        return refuses_file(file) ? -1 : real(file, octets, count, place); \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

#define TRUNCATE(name) \
    int name(int file, off_t length) { \
        REAL(int, name, int, off_t); \
        return refuses_file(file) ? -1 : real(file, length); \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define SYNC(name) \
    int name(int file) { \
        REAL(int, name, int); \
        return refuses_file(file) ? -1 : real(file); \
    }
SYNC(fsync)
SYNC(fdatasync)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return flags & O_CREAT && refuses_path(path) ? -1 : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return flags & O_CREAT && refuses_path(path) ? -1 : real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    return refuses_path(path) ? -1 : real(path, mode);
}

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    return is_bad() && wish->disk == BLOCKED && refuses_path(to) ? -1 : real(from, to);
}
