/* Tensors of torch, seen from C.
 *
 * Nothing here links against torch: what is called of it comes as addresses.
 */
#ifndef TORCH_TENSORS_H
#define TORCH_TENSORS_H

#include "cadam.h"

/* Functions of torch, in the order of torch_symbols.py. Those that take a tensor want a pointer to an at::Tensor, which is
 * itself one pointer. A Python tensor is an object that holds an at::Tensor at some place; which one may change
 * (torch.utils.swap_tensors), so the object is asked anew in each look. */
typedef struct {
    parallel_for_fn *parallel_for;
    int32_t (*is_defined)(void **tensor, _Bool *defined);
    int32_t (*layout)(void **tensor, int32_t *layout);
    int32_t (*data_ptr)(void **tensor, void **data);
    int32_t (*numel)(void **tensor, int64_t *numel);
    int32_t (*dtype)(void **tensor, int32_t *dtype);
    int32_t (*device_type)(void **tensor, int32_t *device_type);
    int32_t (*device_index)(void **tensor, int32_t *device_index);
    int32_t (*is_contiguous)(void **tensor, _Bool *contiguous);
    _Bool (*is_neg)(void **tensor);
    void **(*grad)(void *tensor); /* of the tensor itself */
} torch_functions;

/* Some Python tensors. */
typedef struct {
    const torch_functions *torch;
    char **objects;
    int64_t place; /* where in an object, in bytes, torch's own tensor is */
} tensors;

static inline void **tensor_of(const tensors *some, int64_t i) { return (void **)(some->objects[i] + some->place); }

static inline void **grad_of(const tensors *some, int64_t i) { return some->torch->grad(*tensor_of(some, i)); }

/* Where a tensor lies, how many elements it has, and its kind: device, dtype and, in the last bit, contiguity; -1 for
 * one whose memory does not hold its values as they are, such as one that is yet to be negated. */
typedef struct {
    int64_t address, size, kind;
} sight;

static inline sight look_at(const torch_functions *torch, void **tensor)
{
    void *data = 0;
    int64_t size = 0, kind = -1;
    int32_t dtype = 0, device = 0, index = 0;
    _Bool contiguous = 0;
    if (!torch->is_neg(tensor) && !torch->numel(tensor, &size) && !torch->dtype(tensor, &dtype) &&
        !torch->device_type(tensor, &device) && !torch->device_index(tensor, &index) &&
        !torch->is_contiguous(tensor, &contiguous) && !torch->data_ptr(tensor, &data) && (data || !size))
        kind = 2 * (((int64_t)device * 1000 + index + 1) * 1000 + dtype) + contiguous;
    return (sight){(int64_t)data, size, kind};
}

/* A gradient may be missing, or sparse. */
static inline sight look_at_grad(const tensors *some, int64_t i)
{
    const torch_functions *torch = some->torch;
    void **grad = grad_of(some, i);
    _Bool defined;
    int32_t layout;
    if (torch->is_defined(grad, &defined) || !defined || torch->layout(grad, &layout) || layout != 0)
        return (sight){0, 0, -1};
    return look_at(torch, grad);
}

#endif
