/* Comparison of Python dicts and lists with the objects that they contained before.
 *
 * The state of an optimizer has a dict for each parameter. Comparing thousands of them in Python takes longer than a step.
 */
#include "containers.h"

static int is_unchanged(const python_functions *python, const tracked_container *c)
{
    if (c->is_dict) {
        int64_t position = 0, i = 0;
        void *key, *value;
        for (; python->dict_next(c->object, &position, &key, &value); i++)
            if (i >= c->count || (c->expected[i] && c->expected[i] != value))
                return 0;
        return i == c->count;
    }
    if (python->list_size(c->object) != c->count)
        return 0;
    for (int64_t i = 0; i < c->count; i++)
        if (python->list_item(c->object, i) != c->expected[i])
            return 0;
    return 1;
}

/* Whether all containers hold the expected objects, in the same order. The caller holds Python's lock. */
EXPORT int cadam_are_containers_unchanged(const python_functions *python, const tracked_container *containers,
                                          int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (!is_unchanged(python, &containers[i]))
            return 0;
    return 1;
}
