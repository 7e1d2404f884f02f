/* Double of the AscendCL runtime on host memory: what torch_npu calls to own a device, minus the
 * device. Signatures follow the public acl headers.
 *
 * Everything is synchronous: a copy is a memmove, a stream is a number, an event is a time stamp.
 * Operators are symbols that return success and compute nothing (npu_double/device.py gives them
 * values). With FAKE_ACL_TRACE=FILE each call that orders work is written as one line
 *     call stream event|-
 * so that a test can check who waits for whom. FAKE_NPU_COUNT devices (1), FAKE_NPU_SOC
 * (Ascend910B3).
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_DEVICE = 107001, NO_MEMORY = 207001 };
enum { ALIGNMENT = 512, CORES = 20 };

typedef struct {
    long id;
    double recorded_ms;
    int capturing;
    void *model;
} Handle;

static __thread int current_device = 0;

static Handle *new_handle(void) {
    static long count = 0;
    Handle *handle = calloc(1, sizeof *handle);
    handle->id = ++count;
    return handle;
}

static long id_of(const void *handle) { return handle ? ((const Handle *)handle)->id : 0; }

static void trace(const char *call, const void *stream, const void *event) {
    static FILE *file = NULL;
    static int opened = 0;
    if (!opened) {
        const char *path = getenv("FAKE_ACL_TRACE");
        opened = 1;
        file = path && *path ? fopen(path, "w") : NULL;
    }
    if (!file) return;
    fprintf(file, "%s %ld ", call, id_of(stream));
    if (event) fprintf(file, "%ld\n", id_of(event));
    else fputs("-\n", file);
    fflush(file);
}

static int number(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text ? atoi(text) : otherwise;
}

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

static int allocate(void **pointer, size_t bytes) {
    return posix_memalign(pointer, ALIGNMENT, bytes ? bytes : ALIGNMENT) ? NO_MEMORY : SUCCESS;
}

/* Devices and versions */
int aclInit(const char *config) { (void)config; return SUCCESS; }
int aclrtGetDeviceCount(uint32_t *count) { *count = number("FAKE_NPU_COUNT", 1); return SUCCESS; }
int aclrtGetDevice(int32_t *device) { *device = current_device; return SUCCESS; }
int aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= number("FAKE_NPU_COUNT", 1)) return INVALID_DEVICE;
    current_device = device;
    return SUCCESS;
}
const char *aclrtGetSocName(void) {
    const char *name = getenv("FAKE_NPU_SOC");
    return name ? name : "Ascend910B3";
}
const char *aclGetRecentErrMsg(void) { return ""; }
int aclrtGetCurrentContext(void **context) { static int one; *context = &one; return SUCCESS; }
int aclrtCreateContext(void **context, int32_t device) { (void)device; *context = new_handle(); return SUCCESS; }
int aclrtGetRunMode(int *mode) { *mode = 1; return SUCCESS; }
int aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) { (void)device; (void)attribute; *value = CORES; return SUCCESS; }
int aclGetDeviceCapability(uint32_t device, int kind, int64_t *value) { (void)device; (void)kind; *value = CORES; return SUCCESS; }
int aclGetCannAttribute(int attribute, int32_t *value) { (void)attribute; *value = 0; return SUCCESS; }
int aclrtGetDeviceResLimit(int32_t device, int kind, uint32_t *value) { (void)device; (void)kind; *value = CORES; return SUCCESS; }
int aclrtGetStreamResLimit(void *stream, int kind, uint32_t *value) { (void)stream; (void)kind; *value = CORES; return SUCCESS; }
int aclrtGetResInCurrentThread(int kind, uint32_t *value) { (void)kind; *value = CORES; return SUCCESS; }
int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) { (void)device; *flags = 0; *active = 1; return SUCCESS; }
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) { (void)device; (void)peer; *can = 1; return SUCCESS; }
int aclrtDeviceGetStreamPriorityRange(int32_t *least, int32_t *greatest) { *least = 7; *greatest = 0; return SUCCESS; }
int aclrtDeviceGetBareTgid(int32_t *pid) { *pid = 1; return SUCCESS; }
int aclsysGetVersionStr(char *package, char *version) { (void)package; strcpy(version, "9.0.0"); return SUCCESS; }
int aclsysGetVersionNum(char *package, int32_t *version) { (void)package; *version = 90000000; return SUCCESS; }
int aclsysGetCANNVersion(int name, void *version) { (void)name; memset(version, 0, 128); strcpy((char *)version, "9.0.0"); return SUCCESS; }

/* Memory: device memory is host memory */
int aclrtMalloc(void **pointer, size_t bytes, int policy) { (void)policy; return allocate(pointer, bytes); }
int aclrtMallocAlign32(void **pointer, size_t bytes, int policy) { (void)policy; return allocate(pointer, bytes); }
int aclrtMallocWithCfg(void **pointer, size_t bytes, int policy, void *config) { (void)policy; (void)config; return allocate(pointer, bytes); }
int aclrtMallocHost(void **pointer, size_t bytes) { return allocate(pointer, bytes); }
int aclrtMallocHostWithCfg(void **pointer, uint64_t bytes, void *config) { (void)config; return allocate(pointer, bytes); }
int aclrtFree(void *pointer) { free(pointer); return SUCCESS; }
int aclrtFreeHost(void *pointer) { free(pointer); return SUCCESS; }
int aclrtGetMemInfo(int attribute, size_t *unused, size_t *total) { (void)attribute; *unused = *total = (size_t)32 << 30; return SUCCESS; }
int aclrtPointerGetAttributes(const void *pointer, void *attributes) { (void)pointer; memset(attributes, 0, 64); return SUCCESS; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
    (void)room; (void)kind;
    memmove(to, from, bytes);
    return SUCCESS;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
    (void)room; (void)kind;
    memmove(to, from, bytes);
    trace("MemcpyAsync", stream, NULL);
    return SUCCESS;
}
int aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
    return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}
int aclrtMemset(void *to, size_t room, int32_t value, size_t bytes) { (void)room; memset(to, value, bytes); return SUCCESS; }
int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t bytes, void *stream) { (void)stream; return aclrtMemset(to, room, value, bytes); }

/* Streams and events */
int aclrtCreateStream(void **stream) { *stream = new_handle(); trace("CreateStream", *stream, NULL); return SUCCESS; }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { (void)priority; (void)flags; return aclrtCreateStream(stream); }
int aclrtStreamGetId(void *stream, int32_t *id) { *id = (int32_t)id_of(stream); return SUCCESS; }
int aclrtStreamQuery(void *stream, int *status) { (void)stream; *status = 0; return SUCCESS; }
int aclrtSynchronizeStream(void *stream) { trace("SynchronizeStream", stream, NULL); return SUCCESS; }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout) { (void)timeout; return aclrtSynchronizeStream(stream); }
int aclrtCreateEvent(void **event) { *event = new_handle(); return SUCCESS; }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { (void)flag; *event = new_handle(); return SUCCESS; }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { (void)flag; *event = new_handle(); return SUCCESS; }
int aclrtRecordEvent(void *event, void *stream) {
    ((Handle *)event)->recorded_ms = now_ms();
    trace("RecordEvent", stream, event);
    return SUCCESS;
}
int aclrtStreamWaitEvent(void *stream, void *event) { trace("StreamWaitEvent", stream, event); return SUCCESS; }
int aclrtResetEvent(void *event, void *stream) { trace("ResetEvent", stream, event); return SUCCESS; }
int aclrtSynchronizeEvent(void *event) { trace("SynchronizeEvent", NULL, event); return SUCCESS; }
int aclrtSynchronizeEventWithTimeout(void *event, int32_t timeout) { (void)timeout; return aclrtSynchronizeEvent(event); }
int aclrtQueryEventStatus(void *event, int *status) { (void)event; *status = 1; return SUCCESS; }
int aclrtQueryEventWaitStatus(void *event, int *status) { (void)event; *status = 0; return SUCCESS; }
int aclrtEventElapsedTime(float *ms, void *start, void *end) { *ms = (float)(((Handle *)end)->recorded_ms - ((Handle *)start)->recorded_ms); return SUCCESS; }
int aclrtEventGetTimestamp(void *event, uint64_t *us) { *us = (uint64_t)(((Handle *)event)->recorded_ms * 1e3); return SUCCESS; }

/* Graphs: captured work is not replayed */
int aclmdlRICaptureBegin(void *stream, int mode) {
    (void)mode;
    ((Handle *)stream)->capturing = 1;
    ((Handle *)stream)->model = new_handle();
    trace("CaptureBegin", stream, NULL);
    return SUCCESS;
}
int aclmdlRICaptureGetInfo(void *stream, int *status, void **model) {
    Handle *handle = stream;
    *status = handle && handle->capturing;
    if (model) *model = handle ? handle->model : NULL;
    return SUCCESS;
}
int aclmdlRICaptureEnd(void *stream, void **model) {
    ((Handle *)stream)->capturing = 0;
    *model = ((Handle *)stream)->model;
    trace("CaptureEnd", stream, *model);
    return SUCCESS;
}
int aclmdlRIExecuteAsync(void *model, void *stream) { trace("GraphExecute", stream, model); return SUCCESS; }
int aclmdlRICaptureTaskGrpBegin(void *stream) { trace("TaskGroupBegin", stream, NULL); return SUCCESS; }
int aclmdlRICaptureTaskGrpEnd(void *stream, void **handle) { *handle = new_handle(); trace("TaskGroupEnd", stream, *handle); return SUCCESS; }
int aclmdlRICaptureTaskUpdateBegin(void *stream, void *handle) { trace("TaskUpdateBegin", stream, handle); return SUCCESS; }
int aclmdlRICaptureTaskUpdateEnd(void *stream) { trace("TaskUpdateEnd", stream, NULL); return SUCCESS; }

/* Descriptions of operator arguments: opaque to torch_npu */
void *aclCreateTensor(const int64_t *sizes, uint64_t count, int type, const int64_t *strides, int64_t offset, int format, const int64_t *storage, uint64_t storage_count, void *data) {
    (void)sizes; (void)count; (void)type; (void)strides; (void)offset; (void)format; (void)storage; (void)storage_count; (void)data;
    return new_handle();
}
void *aclCreateScalar(void *value, int type) { (void)value; (void)type; return new_handle(); }
void *aclCreateIntArray(const int64_t *values, uint64_t count) { (void)values; (void)count; return new_handle(); }
void *aclCreateBoolArray(const void *values, uint64_t count) { (void)values; (void)count; return new_handle(); }
void *aclCreateFloatArray(const float *values, uint64_t count) { (void)values; (void)count; return new_handle(); }
void *aclCreateTensorList(void *const *values, uint64_t count) { (void)values; (void)count; return new_handle(); }
void *aclCreateScalarList(void *const *values, uint64_t count) { (void)values; (void)count; return new_handle(); }
void *aclCreateTensorDesc(int type, int count, const int64_t *sizes, int format) { (void)type; (void)count; (void)sizes; (void)format; return new_handle(); }
void *aclCreateDataBuffer(void *data, size_t bytes) { (void)data; (void)bytes; return new_handle(); }
void *aclopCreateAttr(void) { return new_handle(); }
size_t aclGetCompileoptSize(int option) { (void)option; return 16; }
int aclGetCompileopt(int option, char *value, size_t room) { (void)option; memset(value, 0, room); strncpy(value, "disable", room - 1); return SUCCESS; }
