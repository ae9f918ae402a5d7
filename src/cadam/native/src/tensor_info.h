/* Description of the memory of a torch tensor. */
#ifndef TENSOR_INFO_H
#define TENSOR_INFO_H

#include "structs.h"

enum { DTYPE_NUMBERS = 1000, DEVICE_FACTOR = 2 * DTYPE_NUMBERS };

/* The kind is an even number for each device and dtype, plus one if the tensor is contiguous; -1 if the memory does not
 * hold the values: for a sparse tensor, a missing gradient, a tensor of zeros without memory, or one that is lazily negated,
 * as `z.conj().imag` is, whose memory holds the negative values. */
typedef struct {
    int64_t address, size, kind;
} tensor_info;

/* Whether a tensor still has this address, size, dtype and contiguity, and is not negated. Cheaper than describe(): two tensors at one address
 * are on the same device, so the device is not asked for. */
static inline _Bool has_memory(const torch_functions *torch, void **handle, int64_t address, int64_t size, int64_t kind)
{
    void *data = 0;
    int64_t elements = 0;
    int32_t layout = 0, dtype = 0;
    _Bool contiguous = 0;
    return !torch->get_layout(handle, &layout) && layout == 0 /* strided */ && !torch->get_data_ptr(handle, &data) &&
           !torch->get_numel(handle, &elements) && !torch->get_dtype(handle, &dtype) &&
           !torch->is_contiguous(handle, &contiguous) && (int64_t)data == address && elements == size &&
           kind % DEVICE_FACTOR == 2 * dtype + contiguous && !torch->is_neg(handle);
}

/* Describe the tensor that `*handle` (tensor._cdata) points to; 0 is a missing gradient. */
static inline tensor_info describe(const torch_functions *torch, void **handle)
{
    const tensor_info unreadable = {0, 0, -1};
    void *data = 0;
    int64_t size = 0;
    int32_t layout = 0, dtype = 0, device = 0, index = 0;
    _Bool contiguous = 0;
    if (!*handle || torch->get_layout(handle, &layout) || layout != 0 /* strided */)
        return unreadable;
    if (torch->get_numel(handle, &size) || torch->get_dtype(handle, &dtype) ||
        torch->get_device_type(handle, &device) || torch->get_device_index(handle, &index) ||
        torch->is_contiguous(handle, &contiguous) || torch->get_data_ptr(handle, &data) || (!data && size) ||
        torch->is_neg(handle))
        return unreadable;
    const int64_t kind = 2 * (((int64_t)device * 1000 + index + 1) * DTYPE_NUMBERS + dtype) + contiguous;
    return (tensor_info){(int64_t)data, size, kind};
}

/* Fetch a tensor object that is described soon into the cache. Reading thousands of them mostly waits for memory. */
static inline void prefetch_tensor(void **handles, int64_t i, int64_t count)
{
    enum { TENSORS_AHEAD = 8, OBJECT_BYTES = 192 };
    if (i + TENSORS_AHEAD < count)
        for (int line = 0; line < OBJECT_BYTES; line += 64)
            __builtin_prefetch((const char *)handles[i + TENSORS_AHEAD] + line);
}

#endif
