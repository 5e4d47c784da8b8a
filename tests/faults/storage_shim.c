/* Stands between a process and its disk: counts every call that changes or opens something below one folder,
   lets one of them fail, and notes all of them with their content, so that a power cut can be played later.

   cc -shared -fPIC -O2 -pthread -o storage_shim.so storage_shim.c -ldl
   LD_PRELOAD=.../storage_shim.so program

   It sleeps until `shim_arm` is called, which a forked child does by ctypes. Calls go to the kernel by
   `syscall`, so nothing here calls itself. glibc's own stdio writes past `write`: `fwrite` (numpy's tofile)
   is taken here too, and `storage_campaign.py --audit` compares what came by here with what strace saw. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum op { OPEN = 1, CLOSE, DUP, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, LINK, MKDIR, RMDIR, MAP, CONTENT, ACK, ALLOC };

/* One line of the notes, as power_cut.py reads it; then the two paths and the content. */
struct entry {
    uint8_t op, failed; /* errno; SHORT: half was written */
    uint16_t path, other, unused;
    int32_t fd, aux; /* aux: flags of open and rename, descriptor of dup */
    int64_t offset;  /* of a write; size of a truncation; number of a mapping */
    uint32_t ordinal, bytes; /* ordinal: counts the calls that can fail, from 1; 0 for the others */
};

enum { MAX_FD = 4096, MAX_MAPS = 64, SHORT = 255 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile int armed;
static char root[PATH_MAX];
static size_t root_length;
static int notes = -1, ack_pipe = -1;
static uint32_t count, target;
static int target_error;
static volatile size_t smallest_allocation = SIZE_MAX; /* that is counted */
static uint32_t allocations, target_allocation;
static char *open_path[MAX_FD]; /* below the root; NULL for what is elsewhere */
static struct { char *begin; size_t length; int fd; } maps[MAX_MAPS];

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

/* --- names ---------------------------------------------------------------------------------------- */

/* Writes a path below the root, "." for the root itself; returns 0 if it is elsewhere. */
static int inside(int folder, const char *path, char *found) {
    char whole[2 * PATH_MAX];
    size_t length = 0;
    if (!armed || !path) return 0;
    if (path[0] != '/') {
        if (folder == AT_FDCWD) {
            if (!getcwd(whole, PATH_MAX)) return 0;
            length = strlen(whole);
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t got = syscall(SYS_readlinkat, AT_FDCWD, link, whole, PATH_MAX - 1);
            if (got < 0) return 0;
            length = got;
        }
        whole[length++] = '/';
    }
    snprintf(whole + length, sizeof whole - length, "%s", path);
    char clean[2 * PATH_MAX] = "", *end = clean;
    for (char *rest = whole, *part; (part = strtok_r(rest, "/", &rest));) {
        if (!strcmp(part, ".")) continue;
        if (!strcmp(part, "..")) {
            while (end > clean && *--end != '/') {}
            *end = 0;
        } else {
            end += sprintf(end, "/%s", part);
        }
    }
    if (strncmp(clean, root, root_length) || (clean[root_length] && clean[root_length] != '/')) return 0;
    snprintf(found, PATH_MAX, "%s", clean[root_length] ? clean + root_length + 1 : ".");
    return 1;
}

static const char *path_of(int fd) { return armed && fd >= 0 && fd < MAX_FD ? open_path[fd] : NULL; }

static void remember(int fd, const char *path) {
    if (fd < 0 || fd >= MAX_FD) return;
    free(open_path[fd]);
    open_path[fd] = path ? strdup(path) : NULL;
}

/* --- notes; all under the lock -------------------------------------------------------------------- */

static void put(const void *bytes, size_t length) {
    for (const char *at = bytes; length;) {
        ssize_t done = syscall(SYS_write, notes, at, length);
        if (done <= 0) abort(); /* a fault that is not noted would prove nothing */
        at += done, length -= done;
    }
}

static void note(struct entry entry, const char *path, const char *other, const void *content) {
    if (notes < 0) return;
    entry.path = path ? strlen(path) : 0;
    entry.other = other ? strlen(other) : 0;
    if (!content) entry.bytes = 0;
    put(&entry, sizeof entry);
    put(path, entry.path);
    put(other, entry.other);
    put(content, entry.bytes);
}

/* Takes the lock and counts a call; returns the errno it is to fail with, SHORT, or 0. */
static int begin(void) {
    pthread_mutex_lock(&lock);
    return ++count == target ? target_error : 0;
}

static long end(long result, int error) {
    pthread_mutex_unlock(&lock);
    if (error) errno = error;
    return error ? -1 : result;
}

/* Notes what a file holds that is written through memory. */
static void note_maps(void) {
    for (int i = 0; i < MAX_MAPS; i++) {
        struct stat now;
        if (!maps[i].begin || fstat(maps[i].fd, &now)) continue;
        char *content = __libc_malloc(now.st_size + 1);
        ssize_t got = syscall(SYS_pread64, maps[i].fd, content, now.st_size, 0L);
        note((struct entry){.op = CONTENT, .offset = i, .bytes = got < 0 ? 0 : got}, NULL, NULL, content);
        free(content);
    }
}

/* --- what the campaign calls ---------------------------------------------------------------------- */

void shim_arm(const char *folder, int notes_fd, int ack_fd, uint32_t fail, int error, size_t at_least, uint32_t alloc) {
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    notes = notes_fd, ack_pipe = ack_fd;
    count = 0, target = fail, target_error = error;
    allocations = 0, target_allocation = alloc;
    armed = 1;
    smallest_allocation = at_least ? at_least : SIZE_MAX;
}

void shim_disarm(void) {
    smallest_allocation = SIZE_MAX;
    pthread_mutex_lock(&lock);
    note_maps();
    armed = 0;
    pthread_mutex_unlock(&lock);
}

uint32_t shim_calls(void) { return count; }
uint32_t shim_allocations(void) { return allocations; }

/* Tells the world what was acknowledged, at its place among the calls. */
void shim_ack(const char *text, uint32_t length) {
    pthread_mutex_lock(&lock);
    note((struct entry){.op = ACK, .bytes = length}, NULL, NULL, text);
    if (ack_pipe >= 0 && syscall(SYS_write, ack_pipe, text, (size_t)length) != (long)length) abort();
    pthread_mutex_unlock(&lock);
}

/* --- opening and closing -------------------------------------------------------------------------- */

static int do_open(int folder, const char *path, int flags, mode_t mode) {
    char name[PATH_MAX];
    if (!inside(folder, path, name)) {
        int fd = syscall(SYS_openat, folder, path, flags | O_LARGEFILE, mode);
        if (armed) remember(fd, NULL);
        return fd;
    }
    int fails = begin(), fd = -1;
    if (fails == SHORT) fails = 0;
    if (!fails) {
        fd = syscall(SYS_openat, folder, path, flags | O_LARGEFILE, mode);
        remember(fd, name);
    }
    int error = fails ? fails : fd < 0 ? errno : 0;
    note((struct entry){.op = OPEN, .failed = error, .fd = fd, .aux = flags, .ordinal = count}, name, NULL, NULL);
    return end(fd, error);
}

#define MODE(flags, last) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, last); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *path, int flags, ...) { MODE(flags, flags) return do_open(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags, flags) return do_open(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags, flags) return do_open(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags, flags) return do_open(at, path, flags, mode); }
int __open_2(const char *path, int flags) { return do_open(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return do_open(AT_FDCWD, path, flags, 0); }
int __openat_2(int at, const char *path, int flags) { return do_open(at, path, flags, 0); }
int __openat64_2(int at, const char *path, int flags) { return do_open(at, path, flags, 0); }
int creat(const char *path, mode_t mode) { return do_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* Lists a folder: glibc opens it by itself. */
DIR *opendir(const char *path) {
    static DIR *(*real)(const char *);
    char name[PATH_MAX];
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "opendir");
    if (!inside(AT_FDCWD, path, name)) return real(path);
    int fails = begin();
    if (fails == SHORT) fails = 0;
    DIR *found = fails ? NULL : real(path);
    int error = fails ? fails : found ? 0 : errno;
    note((struct entry){.op = OPEN, .failed = error, .fd = -1, .aux = O_DIRECTORY, .ordinal = count}, name, NULL, NULL);
    end(0, error);
    return found;
}

static void forget(int fd) {
    if (!path_of(fd)) return;
    pthread_mutex_lock(&lock);
    note((struct entry){.op = CLOSE, .fd = fd}, NULL, NULL, NULL);
    remember(fd, NULL);
    pthread_mutex_unlock(&lock);
}

int close(int fd) {
    forget(fd);
    return syscall(SYS_close, fd);
}

int fclose(FILE *file) {
    static int (*real)(FILE *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "fclose");
    forget(fileno(file));
    return real(file);
}

static int copied(int fd, int copy) {
    if (copy >= 0 && armed) {
        pthread_mutex_lock(&lock);
        const char *path = path_of(fd);
        if (path) note((struct entry){.op = DUP, .fd = fd, .aux = copy}, NULL, NULL, NULL);
        remember(copy, path);
        pthread_mutex_unlock(&lock);
    }
    return copy;
}

int dup(int fd) { return copied(fd, syscall(SYS_dup, fd)); }
int dup3(int fd, int copy, int flags) { return copied(fd, syscall(SYS_dup3, fd, copy, flags)); }
int dup2(int fd, int copy) { return fd == copy ? copy : dup3(fd, copy, 0); }

int fcntl64(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    int result = syscall(SYS_fcntl, fd, command, argument);
    return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? copied(fd, result) : result;
}
int fcntl(int fd, int command, ...) __attribute__((alias("fcntl64")));

/* --- writing -------------------------------------------------------------------------------------- */

static off_t end_of(int fd) {
    struct stat now;
    return fstat(fd, &now) ? 0 : now.st_size;
}

/* Writes at an offset, or where the file stands (-1). */
static ssize_t do_write(int fd, const void *bytes, size_t length, off_t offset) {
    const char *path = path_of(fd);
    if (!path)
        return offset < 0 ? syscall(SYS_write, fd, bytes, length) : syscall(SYS_pwrite64, fd, bytes, length, offset);
    int fails = begin();
    size_t some = fails == SHORT && length > 1 ? length / 2 : length;
    ssize_t done = -1;
    off_t at = offset >= 0 ? offset : syscall(SYS_fcntl, fd, F_GETFL, 0) & O_APPEND ? end_of(fd) : lseek(fd, 0, SEEK_CUR);
    if (!fails || fails == SHORT)
        done = offset < 0 ? syscall(SYS_write, fd, bytes, some) : syscall(SYS_pwrite64, fd, bytes, some, offset);
    int error = fails && fails != SHORT ? fails : done < 0 ? errno : 0;
    struct entry entry = {.op = WRITE, .failed = fails ? fails : error, .fd = fd, .aux = length, .offset = at,
                          .ordinal = count, .bytes = done < 0 ? 0 : done};
    note(entry, path, NULL, bytes);
    return end(done, error);
}

ssize_t write(int fd, const void *bytes, size_t length) { return do_write(fd, bytes, length, -1); }
ssize_t pwrite(int fd, const void *bytes, size_t length, off_t at) { return do_write(fd, bytes, length, at); }
ssize_t pwrite64(int fd, const void *bytes, size_t length, off_t at) { return do_write(fd, bytes, length, at); }

/* Several pieces are one call: they are joined first. */
static ssize_t do_writev(int fd, const struct iovec *parts, int num_parts, off_t offset) {
    if (!path_of(fd))
        return offset < 0 ? syscall(SYS_writev, fd, parts, num_parts)
                          : syscall(SYS_pwritev, fd, parts, num_parts, offset, (long)0);
    size_t length = 0;
    for (int i = 0; i < num_parts; i++) length += parts[i].iov_len;
    char *whole = __libc_malloc(length + 1), *at = whole;
    for (int i = 0; i < num_parts; i++) at = mempcpy(at, parts[i].iov_base, parts[i].iov_len);
    ssize_t done = do_write(fd, whole, length, offset);
    int error = errno;
    free(whole);
    errno = error;
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int n) { return do_writev(fd, parts, n, -1); }
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at) { return do_writev(fd, parts, n, at); }
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off_t at) { return do_writev(fd, parts, n, at); }

/* Copies from file to file, which the kernel would do by itself. */
static ssize_t copy(int from, off_t *from_at, int to, off_t *to_at, size_t length) {
    static const size_t AT_ONCE = 1 << 20;
    char *bytes = __libc_malloc(AT_ONCE);
    off_t at = from_at ? *from_at : lseek(from, 0, SEEK_CUR);
    ssize_t done = syscall(SYS_pread64, from, bytes, length < AT_ONCE ? length : AT_ONCE, at);
    if (done > 0) done = do_write(to, bytes, done, to_at ? *to_at : -1);
    int error = errno;
    free(bytes);
    if (done > 0) {
        if (from_at) *from_at += done;
        else lseek(from, done, SEEK_CUR);
        if (to_at) *to_at += done;
    }
    errno = error;
    return done;
}

ssize_t sendfile(int to, int from, off_t *at, size_t length) {
    return path_of(to) ? copy(from, at, to, NULL, length) : syscall(SYS_sendfile, to, from, at, length);
}
ssize_t sendfile64(int to, int from, off_t *at, size_t length) { return sendfile(to, from, at, length); }
ssize_t copy_file_range(int from, off_t *from_at, int to, off_t *to_at, size_t length, unsigned flags) {
    return path_of(to) ? copy(from, from_at, to, to_at, length)
                       : syscall(SYS_copy_file_range, from, from_at, to, to_at, length, flags);
}

size_t fwrite(const void *bytes, size_t size, size_t items, FILE *file) {
    static size_t (*real)(const void *, size_t, size_t, FILE *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "fwrite");
    int fd = fileno(file);
    if (!path_of(fd) || !size) return real(bytes, size, items, file);
    fflush(file);
    size_t length = size * items, done = 0;
    while (done < length) {
        ssize_t some = do_write(fd, (const char *)bytes + done, length - done, -1);
        if (some < 0) break;
        done += some;
    }
    int error = errno;
    fseeko(file, lseek(fd, 0, SEEK_CUR), SEEK_SET); /* stdio keeps an offset of its own */
    errno = error;
    return done / size;
}

static int do_truncate(int fd, off_t size) {
    const char *path = path_of(fd);
    if (!path) return syscall(SYS_ftruncate, fd, size);
    int fails = begin(), result = -1;
    if (fails == SHORT) fails = 0;
    if (!fails) result = syscall(SYS_ftruncate, fd, size);
    int error = fails ? fails : result < 0 ? errno : 0;
    note((struct entry){.op = TRUNCATE, .failed = error, .fd = fd, .offset = size, .ordinal = count}, path, NULL, NULL);
    return end(result, error);
}

int ftruncate(int fd, off_t size) { return do_truncate(fd, size); }
int ftruncate64(int fd, off_t size) { return do_truncate(fd, size); }

int truncate(const char *path, off_t size) {
    char name[PATH_MAX];
    if (!inside(AT_FDCWD, path, name)) return syscall(SYS_truncate, path, size);
    int fd = do_open(AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0);
    if (fd < 0) return -1;
    int result = do_truncate(fd, size), error = errno;
    close(fd);
    errno = error;
    return result;
}
int truncate64(const char *path, off_t size) { return truncate(path, size); }

int fallocate(int fd, int mode, off_t at, off_t length) {
    if (!path_of(fd)) return syscall(SYS_fallocate, fd, mode, at, length);
    return mode ? (errno = EOPNOTSUPP, -1) : at + length > end_of(fd) ? do_truncate(fd, at + length) : 0;
}
int fallocate64(int fd, int mode, off_t at, off_t length) { return fallocate(fd, mode, at, length); }
int posix_fallocate(int fd, off_t at, off_t length) { return fallocate(fd, 0, at, length) ? errno : 0; }
int posix_fallocate64(int fd, off_t at, off_t length) { return posix_fallocate(fd, at, length); }

/* --- bringing to the disk ------------------------------------------------------------------------- */

static int do_sync(long number, int fd) {
    const char *path = path_of(fd);
    if (!path) return syscall(number, fd);
    int fails = begin();
    if (fails == SHORT) fails = 0;
    note_maps();
    note((struct entry){.op = SYNC, .failed = fails, .fd = fd, .ordinal = count}, path, NULL, NULL);
    return end(0, fails); /* the power cut is played, so the disk need not be waited for */
}

int fsync(int fd) { return do_sync(SYS_fsync, fd); }
int fdatasync(int fd) { return do_sync(SYS_fdatasync, fd); }

void *mmap(void *where, size_t length, int access, int flags, int fd, off_t offset) {
    const char *path = path_of(fd);
    if (!path || !(flags & MAP_SHARED) || !(access & PROT_WRITE))
        return (void *)syscall(SYS_mmap, where, length, access, flags, fd, offset);
    int fails = begin(), i = 0;
    if (fails == SHORT) fails = 0;
    void *found = fails ? MAP_FAILED : (void *)syscall(SYS_mmap, where, length, access, flags, fd, offset);
    int error = fails ? fails : found == MAP_FAILED ? errno : 0;
    while (i < MAX_MAPS - 1 && maps[i].begin) i++;
    if (!error) maps[i].begin = found, maps[i].length = length, maps[i].fd = syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 1000);
    note((struct entry){.op = MAP, .failed = error, .fd = fd, .offset = i, .ordinal = count}, path, NULL, NULL);
    end(0, error);
    return found;
}
void *mmap64(void *where, size_t length, int access, int flags, int fd, off_t at) {
    return mmap(where, length, access, flags, fd, at);
}

static int mapping(void *begin) {
    for (int i = 0; armed && i < MAX_MAPS; i++)
        if (maps[i].begin && (char *)begin >= maps[i].begin && (char *)begin < maps[i].begin + maps[i].length) return i;
    return -1;
}

int msync(void *where, size_t length, int flags) {
    int i = mapping(where);
    if (i < 0) return syscall(SYS_msync, where, length, flags);
    int fails = begin();
    if (fails == SHORT) fails = 0;
    note_maps();
    note((struct entry){.op = SYNC, .failed = fails, .fd = -1, .offset = i, .ordinal = count}, "mapped", NULL, NULL);
    return end(0, fails);
}

int munmap(void *where, size_t length) {
    int i = mapping(where);
    if (i >= 0) {
        pthread_mutex_lock(&lock);
        note_maps();
        syscall(SYS_close, maps[i].fd);
        maps[i].begin = NULL;
        pthread_mutex_unlock(&lock);
    }
    return syscall(SYS_munmap, where, length);
}

/* --- names of files ------------------------------------------------------------------------------- */

/* Calls of one or two names. The arguments are those of the kernel's call. */
static int do_names(enum op op, const char *name, const char *other, int flags, long number, long a, long b, long c,
                    long d, long e) {
    int fails = begin(), result = -1;
    if (fails == SHORT) fails = 0;
    if (!fails) result = syscall(number, a, b, c, d, e);
    int error = fails ? fails : result < 0 ? errno : 0;
    note((struct entry){.op = op, .failed = error, .aux = flags, .ordinal = count}, name, other, NULL);
    return end(result, error);
}

int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    char name[PATH_MAX], other[PATH_MAX];
    if (!inside(from_at, from, name) || !inside(to_at, to, other))
        return syscall(SYS_renameat2, from_at, from, to_at, to, flags);
    return do_names(RENAME, name, other, flags, SYS_renameat2, from_at, (long)from, to_at, (long)to, flags);
}
int renameat(int from_at, const char *from, int to_at, const char *to) { return renameat2(from_at, from, to_at, to, 0); }
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    char name[PATH_MAX], other[PATH_MAX];
    if (!inside(from_at, from, name) || !inside(to_at, to, other))
        return syscall(SYS_linkat, from_at, from, to_at, to, flags);
    return do_names(LINK, name, other, flags, SYS_linkat, from_at, (long)from, to_at, (long)to, flags);
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int at, const char *path, int flags) {
    char name[PATH_MAX];
    if (!inside(at, path, name)) return syscall(SYS_unlinkat, at, path, flags);
    return do_names(flags & AT_REMOVEDIR ? RMDIR : UNLINK, name, NULL, 0, SYS_unlinkat, at, (long)path, flags, 0, 0);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int at, const char *path, mode_t mode) {
    char name[PATH_MAX];
    if (!inside(at, path, name)) return syscall(SYS_mkdirat, at, path, mode);
    return do_names(MKDIR, name, NULL, 0, SYS_mkdirat, at, (long)path, mode, 0, 0);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* --- memory: large pieces alone, since Python itself does not outlive the loss of a small one -------- */

static int is_refused(size_t size) {
    if (size < smallest_allocation) return 0;
    if (__atomic_add_fetch(&allocations, 1, __ATOMIC_SEQ_CST) != target_allocation) return 0;
    pthread_mutex_lock(&lock);
    note((struct entry){.op = ALLOC, .failed = ENOMEM, .aux = size > INT_MAX ? INT_MAX : size}, NULL, NULL, NULL);
    pthread_mutex_unlock(&lock);
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) { return is_refused(size) ? NULL : __libc_malloc(size); }
void *calloc(size_t items, size_t size) { return is_refused(items * size) ? NULL : __libc_calloc(items, size); }
void *realloc(void *old, size_t size) { return is_refused(size) ? NULL : __libc_realloc(old, size); }
void *memalign(size_t to, size_t size) { return is_refused(size) ? NULL : __libc_memalign(to, size); }
void *aligned_alloc(size_t to, size_t size) { return memalign(to, size); }
int posix_memalign(void **found, size_t to, size_t size) {
    void *memory = memalign(to, size);
    if (memory) *found = memory;
    return memory ? 0 : ENOMEM;
}
