/* A snapshot of many tensors at once: asking torch about thousands of tensors from Python takes longer than their step. */
#include "tensor_info.h"

/* What cadam_snapshot_tensors returns, combined: a tensor has another address; another size or kind; is a view. */
enum { MOVED = 1, CHANGED = 2, HAS_VIEWS = 4 };

typedef struct {
    const torch_functions *torch;
    void **handles;
    int64_t *addresses, *sizes, *kinds;
    int64_t news;
} snapshot;

static void snapshot_range(int64_t begin, int64_t end, void *context)
{
    snapshot *s = context;
    int64_t news = 0;
    for (int64_t i = begin; i < end; i++) {
        prefetch_tensor(s->handles, i, end);
        const tensor_info now = describe(s->torch, &s->handles[i]);
        if (s->addresses[i] != now.address)
            news |= MOVED;
        if (s->sizes[i] != now.size || s->kinds[i] != now.kind)
            news |= CHANGED;
        if (now.is_view)
            news |= HAS_VIEWS;
        s->addresses[i] = now.address;
        s->sizes[i] = now.size;
        s->kinds[i] = now.kind;
    }
    __atomic_fetch_or(&s->news, news, __ATOMIC_RELAXED);
}

/* Write address, size and kind of each tensor and return what differs from the values that were there before. `threads`
 * lets torch's threads take part, which is worth it only while they are awake. */
EXPORT int64_t cadam_snapshot_tensors(const torch_functions *torch, void **handles, int64_t count, int64_t threads,
                                      int64_t *addresses, int64_t *sizes, int64_t *kinds)
{
    enum { GRAIN = 512 };
    snapshot s = {torch, handles, addresses, sizes, kinds, 0};
    if (threads && count > GRAIN)
        torch->parallel_for(0, count, GRAIN, snapshot_range, &s);
    else
        snapshot_range(0, count, &s);
    return s.news;
}
