/* The few calls of CUDA's driver by which pages are exported and mapped, over files in host memory: what the real
 * cuda-bindings make of our arguments is seen here, and what they make of the answers. Layouts: cuda.h of CUDA 13.
 * HOST_DRIVER_WITHOUT_RDMA in the environment: pages that are asked for as reachable by RDMA are refused. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_SUPPORTED = 801 };
enum { PINNED = 1, POSIX_FILE = 1, ON_DEVICE = 1, READ = 1, READ_WRITE = 3, MINIMUM = 0 };
enum { EXPORTS_FILES = 103, RDMA = 110 };

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long Handle; /* the file's descriptor plus 1 */

struct Location {
    int type, id;
};
struct Properties {
    int type, requested;
    struct Location location;
    void *win32;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};
struct Access {
    struct Location location;
    int flags;
};

static const size_t granularity = 2 << 20;

static CUresult init(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }

static CUresult device_get(int *device, int index) {
    *device = index;
    return index == 0 ? SUCCESS : INVALID_DEVICE;
}

static CUresult device_attribute(int *value, int attribute, int device) {
    *value = attribute == EXPORTS_FILES || attribute == RDMA;
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}

static int are_ours(const struct Properties *asked) {
    return asked && asked->type == PINNED && asked->requested == POSIX_FILE && asked->location.type == ON_DEVICE &&
           asked->location.id == 0;
}

static CUresult get_granularity(size_t *bytes, const struct Properties *asked, int option) {
    *bytes = granularity;
    return are_ours(asked) && option == MINIMUM ? SUCCESS : INVALID_VALUE;
}

static CUresult create(Handle *handle, size_t size, const struct Properties *asked, unsigned long long flags) {
    if (!are_ours(asked) || !size || size % granularity || flags) return INVALID_VALUE;
    if (asked->flags.rdma && getenv("HOST_DRIVER_WITHOUT_RDMA")) return NOT_SUPPORTED;
    int file = memfd_create("pages", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size)) return OUT_OF_MEMORY;
    *handle = (Handle)file + 1;
    return SUCCESS;
}

static CUresult export_handle(void *file, Handle handle, int kind, unsigned long long flags) {
    if (kind != POSIX_FILE || flags) return INVALID_VALUE;
    int copy = fcntl((int)handle - 1, F_DUPFD_CLOEXEC, 0);
    *(int *)file = copy;
    return copy < 0 ? INVALID_VALUE : SUCCESS;
}

static CUresult import_handle(Handle *handle, void *file, int kind) {
    int copy = kind == POSIX_FILE ? fcntl((int)(intptr_t)file, F_DUPFD_CLOEXEC, 0) : -1;
    *handle = (Handle)copy + 1;
    return copy < 0 ? INVALID_VALUE : SUCCESS;
}

static CUresult release(Handle handle) { return close((int)handle - 1) ? INVALID_VALUE : SUCCESS; }

static CUresult reserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish,
                        unsigned long long flags) {
    if (size % granularity || alignment || wish || flags) return INVALID_VALUE;
    void *range = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (CUdeviceptr)range;
    return range == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}

static CUresult map(CUdeviceptr address, size_t size, size_t offset, Handle handle, unsigned long long flags) {
    struct stat pages;
    if (offset || flags || fstat((int)handle - 1, &pages) || (size_t)pages.st_size != size) return INVALID_VALUE;
    void *range = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle - 1, 0);
    return range == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}

static CUresult set_access(CUdeviceptr address, size_t size, const struct Access *access, size_t count) {
    if (count != 1 || access->location.type != ON_DEVICE || access->location.id != 0) return INVALID_VALUE;
    if (access->flags != READ && access->flags != READ_WRITE) return INVALID_VALUE;
    int protection = access->flags == READ ? PROT_READ : PROT_READ | PROT_WRITE;
    return mprotect((void *)address, size, protection) ? INVALID_VALUE : SUCCESS;
}

static CUresult unmap(CUdeviceptr address, size_t size) {
    void *range = mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return range == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}

static CUresult address_free(CUdeviceptr address, size_t size) {
    return munmap((void *)address, size) ? INVALID_VALUE : SUCCESS;
}

static CUresult version(int *number) {
    *number = 13000;
    return SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int at_version, uint64_t flags, int *status);

static const struct {
    const char *name;
    void *function;
} calls[] = {
    {"cuInit", init},
    {"cuDriverGetVersion", version},
    {"cuDeviceGet", device_get},
    {"cuDeviceGetAttribute", device_attribute},
    {"cuMemGetAllocationGranularity", get_granularity},
    {"cuMemCreate", create},
    {"cuMemExportToShareableHandle", export_handle},
    {"cuMemImportFromShareableHandle", import_handle},
    {"cuMemRelease", release},
    {"cuMemAddressReserve", reserve},
    {"cuMemMap", map},
    {"cuMemSetAccess", set_access},
    {"cuMemUnmap", unmap},
    {"cuMemAddressFree", address_free},
    {"cuGetProcAddress", cuGetProcAddress_v2},
    {"cuGetProcAddress_v2", cuGetProcAddress_v2},
};

CUresult cuGetProcAddress_v2(const char *name, void **function, int at_version, uint64_t flags, int *status) {
    (void)at_version, (void)flags;
    *function = NULL;
    for (size_t index = 0; index < sizeof calls / sizeof *calls; ++index)
        if (!strcmp(name, calls[index].name)) *function = calls[index].function;
    if (status) *status = *function ? 0 : 1;
    return SUCCESS;
}
