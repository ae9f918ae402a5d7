/* A snapshot of many tensors at once: asking torch about thousands of tensors from Python takes longer than their step. */
#include "tensor_info.h"

/* Flags that cadam_snapshot_tensors returns: a tensor has another address; another size or kind. */
enum { MOVED = 1, CHANGED = 2 };

typedef struct {
    const torch_functions *torch;
    void **handles;
    int64_t *addresses, *sizes, *kinds;
    _Bool same_tensors;
    int64_t news;
} snapshot;

static void snapshot_range(int64_t begin, int64_t end, void *context)
{
    snapshot *s = context;
    int64_t news = 0;
    for (int64_t i = begin; i < end; i++) {
        prefetch_tensor(s->handles, i, end);
        if (s->same_tensors && s->kinds[i] >= 0 && s->addresses[i] /* 0 is an empty tensor on any device */ &&
            has_memory(s->torch, &s->handles[i], s->addresses[i], s->sizes[i], s->kinds[i]))
            continue;
        const tensor_info now = describe(s->torch, &s->handles[i]);
        if (s->addresses[i] != now.address)
            news |= MOVED;
        if (s->sizes[i] != now.size || s->kinds[i] != now.kind)
            news |= CHANGED;
        s->addresses[i] = now.address;
        s->sizes[i] = now.size;
        s->kinds[i] = now.kind;
    }
    __atomic_fetch_or(&s->news, news, __ATOMIC_RELAXED);
}

/* Write address, size and kind of each tensor and return what differs from the values that were there before. `threads`
 * lets torch's threads take part, which is worth it only while they are awake. `same_tensors` says that the tensors are those
 * of the last snapshot. Less is then asked of those that have not changed. */
EXPORT int64_t cadam_snapshot_tensors(const torch_functions *torch, void **handles, int64_t count, int64_t threads,
                                      int64_t same_tensors, int64_t *addresses, int64_t *sizes, int64_t *kinds)
{
    enum { GRAIN = 512 };
    snapshot s = {torch, handles, addresses, sizes, kinds, same_tensors, 0};
    if (threads && count > GRAIN)
        torch->parallel_for(0, count, GRAIN, snapshot_range, &s);
    else
        snapshot_range(0, count, &s);
    return s.news;
}
