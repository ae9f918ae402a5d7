/* Choice of the instruction set, lookup of kernels by name, and the library's fingerprint. */
#include "cadam.h"

#include <string.h>

extern const instruction_set cadam_portable;
#ifdef __x86_64__
extern const instruction_set cadam_avx2, cadam_avx512;
#endif

static int level_limit = -1; /* set by cadam_limit_instruction_set; -1 for no limit */

const instruction_set *cadam_instruction_set(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    const int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    const int best = avx512 ? 2 : avx2 ? 1 : 0;
    const int level = level_limit < 0 || level_limit > best ? best : level_limit;
    return level == 2 ? &cadam_avx512 : level == 1 ? &cadam_avx2 : &cadam_portable;
#else
    return &cadam_portable;
#endif
}

/* Use at most this instruction set: 0 portable, 1 AVX2, 2 AVX-512, -1 for the best one. Tests compare the results of all
 * of them. Returns the instruction set in use. */
EXPORT int cadam_limit_instruction_set(int level)
{
    level_limit = level;
#ifdef __x86_64__
    const instruction_set *set = cadam_instruction_set();
    return set == &cadam_avx512 ? 2 : set == &cadam_avx2 ? 1 : 0;
#else
    return 0;
#endif
}

/* Return the hash of the sources, flags and rules that this library was compiled from, see native/build.py. */
EXPORT const char *cadam_fingerprint(void) { return FINGERPRINT; }

/* Return the index of a kernel by its name; -1 if there is none. */
EXPORT int cadam_kernel_index(const char *name)
{
    const instruction_set *set = cadam_instruction_set();
    for (int i = 0; i < set->count; i++)
        if (!strcmp(set->kernels[i].name, name))
            return i;
    return -1;
}

EXPORT int32_t cadam_run_inline(int64_t begin, int64_t end, int64_t grain, range_fn *f, void *context)
{
    (void)grain;
    f(begin, end, context);
    return 0;
}
