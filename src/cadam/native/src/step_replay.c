/* The replayed step on CUDA: from step() to the kernel launches in one call.
 *
 * The library links against neither torch nor Python nor CUDA. Their functions arrive as addresses.
 */
#include "containers.h"
#include "tensor_info.h"

#include <string.h>

enum { DONE = 0, NOT_TAKEN = -1 }; /* positive results are errors of the CUDA driver */

/* Whether all Python containers hold the objects, and all parameters and state tensors the memory, that they had when the
 * step was recorded. */
static int is_unchanged(const replay_step *s)
{
    if (!cadam_are_containers_unchanged(s->python, s->container, s->containers))
        return 0;
    for (const replay_part *p = s->part; p < s->part + s->parts; p++)
        for (int64_t i = 0; i < p->fixed_tensors; i++) {
            prefetch_tensor(p->fixed, i, p->fixed_tensors);
            if (!has_memory(s->torch, &p->fixed[i], p->fixed_addresses[i], p->fixed_sizes[i], p->fixed_kinds[i]))
                return 0;
        }
    return 1;
}

/* Write the coefficients and the addresses of the gradients for the device. Returns DONE, or NOT_TAKEN if the gradients or
 * the step counts are not the expected ones. */
static int fill(const replay_step *s, int64_t *to)
{
    for (const replay_part *p = s->part; p < s->part + s->parts; p++) {
        const float step = (float)p->coefficients[0];
        memcpy(to, p->coefficients, (size_t)p->columns * sizeof *to);
        to += p->columns;
        for (int64_t i = 0; i < p->count; i++)
            if (next_step(p->steps[i]) != step)
                return NOT_TAKEN;
        if (p->is_sparse)
            continue;
        for (int64_t i = 0; i < p->count; i++) {
            prefetch_tensor(p->grads, i, p->count);
            const tensor_info grad = describe(s->torch, &p->grads[i]);
            if (grad.kind < 0 || grad.size != p->grad_sizes[i] || grad.kind != p->grad_kinds[i])
                return NOT_TAKEN;
            *to++ = grad.address;
        }
        to += p->count & 1;
    }
    return DONE;
}

/* Launch kernels. Returns 0 or an error of the driver. The caller must not hold Python's lock: the driver waits while its
 * queue is full, and the device may be waiting for another Python thread. */
EXPORT int64_t cadam_replay_launch(const cuda_functions *cuda, const replay_launch *launch, int64_t count, void *stream)
{
    int failed = 0;
    for (const replay_launch *k = launch; k < launch + count && !failed; k++)
        if (k->blocks_x)
            failed = cuda->launch(k->function, (unsigned)k->blocks_x, (unsigned)k->blocks_y, 1, (unsigned)k->threads, 1, 1,
                                  (unsigned)k->shared_bytes, stream, k->arguments, 0);
    return failed;
}

/* Take the recorded step again on this stream, if only the gradients' addresses and the coefficients have changed. Returns
 * DONE; or, with nothing done, NOT_TAKEN if something else has changed or the device has not yet read the slot; or an error
 * of the driver. */
EXPORT int64_t cadam_replay_step(replay_step *s, void *stream)
{
    const cuda_functions *cuda = s->cuda;
    void *context = 0, *event = s->events[s->slot];
    int capturing = 0;
    int64_t failed;
    int64_t *host = s->host + s->slot * s->words;
    if (cuda->current_context(&context) || context != s->context || cuda->is_capturing(stream, &capturing) ||
        capturing || cuda->event_query(event) || !is_unchanged(s))
        return NOT_TAKEN;
    if ((failed = fill(s, host)))
        return failed;
    s->slot = (s->slot + 1) % s->slots;
    void *thread = s->python->save_thread();
    if (!(failed = cuda->copy_to_device(s->device, host, (uint64_t)s->words * sizeof *host, stream)) &&
        !(failed = cuda->event_record(event, stream)))
        failed = cadam_replay_launch(cuda, s->launch, s->launches, stream);
    s->python->restore_thread(thread);
    if (failed)
        return failed;
    for (const replay_part *p = s->part; p < s->part + s->parts; p++)
        for (int64_t i = 0; i < p->count; i++)
            p->steps[i] = next_step(p->steps[i]);
    return DONE;
}
