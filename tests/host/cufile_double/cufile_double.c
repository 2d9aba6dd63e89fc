/* A stand-in for NVIDIA's libcufile, for tests only: never installed, never packaged.
 *
 * Preloaded (LD_PRELOAD), it answers DeepSpeed's gds op on hosts whose cuFile can't register a file. It
 * registers everything, and "GPUDirect" writes and reads are copies through host memory: cudaMemcpy, then
 * pwrite or pread. Rows made with it are labelled gds-compat with this library's path.
 *
 * CUFILE_DOUBLE_REFUSE=N makes cuFileHandleRegister answer with cuFile's error N, CUFILE_DOUBLE_SHORT=N makes
 * every write stop after N bytes, and CUFILE_DOUBLE_LOG=PATH gets one line a call.
 */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <cufile.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* O_DIRECT asks for memory on block boundaries; 4096 suits every block size in use. */
#define ALIGNMENT 4096

static const CUfileError_t OK = {CU_FILE_SUCCESS, CUDA_SUCCESS};

static void note(const char *call, long long bytes, long long offset) {
    const char *path = getenv("CUFILE_DOUBLE_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%s %lld %lld\n", call, bytes, offset);
        fclose(log);
    }
}

CUfileError_t cuFileDriverOpen(void) {
    note("open", 0, 0);
    return OK;
}

#undef cuFileDriverClose
CUfileError_t cuFileDriverClose(void) {
    note("close", 0, 0);
    return OK;
}

CUfileError_t cuFileDriverClose_v2(void) { return cuFileDriverClose(); }

CUfileError_t cuFileDriverSetMaxDirectIOSize(size_t kib) {
    note("max_direct_io_kib", (long long)kib, 0);
    return OK;
}

CUfileError_t cuFileHandleRegister(CUfileHandle_t *handle, CUfileDescr_t *description) {
    const char *refuse = getenv("CUFILE_DOUBLE_REFUSE");
    if (refuse) return (CUfileError_t){(CUfileOpError)atoi(refuse), CUDA_SUCCESS};
    int *descriptor = malloc(sizeof *descriptor);
    if (!descriptor) return (CUfileError_t){CU_FILE_MEMORY_ALREADY_REGISTERED, CUDA_SUCCESS};
    *descriptor = description->handle.fd;
    *handle = descriptor;
    return OK;
}

void cuFileHandleDeregister(CUfileHandle_t handle) { free(handle); }

CUfileError_t cuFileBufRegister(const void *base, size_t length, int flags) {
    struct cudaPointerAttributes found;
    (void)flags;
    if (cudaPointerGetAttributes(&found, base) != cudaSuccess || found.type != cudaMemoryTypeDevice)
        return (CUfileError_t){CU_FILE_INVALID_VALUE, CUDA_SUCCESS};
    note("register", (long long)length, 0);
    return OK;
}

CUfileError_t cuFileBufDeregister(const void *base) {
    (void)base;
    note("deregister", 0, 0);
    return OK;
}

/* Copies `size` bytes between the GPU and the file; bytes moved, or -1 with errno as cuFile does for POSIX errors. */
static ssize_t move(int writing, CUfileHandle_t handle, char *device, size_t size, off_t offset) {
    void *bounce = NULL;
    const size_t room = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (posix_memalign(&bounce, ALIGNMENT, room ? room : ALIGNMENT)) {
        errno = ENOMEM;
        return -1;
    }
    ssize_t moved = 0;
    if (writing && cudaMemcpy(bounce, device, size, cudaMemcpyDeviceToHost) != cudaSuccess) moved = -1;
    while (moved >= 0 && (size_t)moved < size) {
        char *at = (char *)bounce + moved;
        const ssize_t count = writing ? pwrite(*(int *)handle, at, size - moved, offset + moved)
                                      : pread(*(int *)handle, at, size - moved, offset + moved);
        if (count < 0) moved = -1;
        if (count <= 0) break;
        moved += count;
    }
    if (!writing && moved > 0 && cudaMemcpy(device, bounce, moved, cudaMemcpyHostToDevice) != cudaSuccess) moved = -1;
    free(bounce);
    return moved;
}

ssize_t cuFileWrite(CUfileHandle_t handle, const void *base, size_t size, off_t offset, off_t buffer_offset) {
    const char *limit = getenv("CUFILE_DOUBLE_SHORT");
    if (limit && (size_t)atoll(limit) < size) size = (size_t)atoll(limit);
    note("write", (long long)size, (long long)offset);
    return move(1, handle, (char *)base + buffer_offset, size, offset);
}

ssize_t cuFileRead(CUfileHandle_t handle, void *base, size_t size, off_t offset, off_t buffer_offset) {
    note("read", (long long)size, (long long)offset);
    return move(0, handle, (char *)base + buffer_offset, size, offset);
}
