/* The normalization of numeric features by ranks, which NumberNormalizer in online/models/inputs.py explains. */
#ifndef CADAM_NUMBER_RANKS_H
#define CADAM_NUMBER_RANKS_H

#include <math.h>
#include <stdint.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Write to `counts` how many of the n ascending values are below each of some numbers, or not above it if `or_equal`. `lanes`
 * is the number of numbers, a constant. Several searches at the same time take little longer than one, which mostly waits for
 * the memory. The loop has no branch that depends on a value, because the processor could not predict it. */
ALWAYS_INLINE void count_below(const double *values, int64_t n, const double *x, int64_t *counts, int or_equal, int lanes)
{
    for (int lane = 0; lane < lanes; lane++)
        counts[lane] = 0;
    while (n > 1) {
        const int64_t half = n / 2;
        for (int lane = 0; lane < lanes; lane++) {
            const double value = values[counts[lane] + half - 1];
            counts[lane] += half & -(int64_t)(or_equal ? value <= x[lane] : value < x[lane]);
        }
        n -= half;
    }
    for (int lane = 0; n && lane < lanes; lane++)
        counts[lane] += or_equal ? values[counts[lane]] <= x[lane] : values[counts[lane]] < x[lane];
}

enum { MAX_LANES = 8 };

/* Return the rank of a number among `known` values. `both` is how many of them are below it, plus how many are not above it.
 * Half of this sum is in the middle of equal values. */
static inline double rank_of(int64_t both, int64_t known) { return (double)(both + 1) / (2.0 * (double)(known + 1)); }

/* Write the ranks of some numbers, at most MAX_LANES, among `known` ascending values to `ranks`, and the counts that they are
 * computed from to `both`. The rank of a number that is not finite is 0.5; all others are greater than 0 and less than 1. */
ALWAYS_INLINE void find_ranks(const double *values, int64_t known, const double *x, double *ranks, int64_t *both, int lanes)
{
    int64_t below[MAX_LANES], not_above[MAX_LANES];
    int has_equal = 0;
    count_below(values, known, x, below, 0, lanes);
    for (int lane = 0; lane < lanes; lane++)
        has_equal |= below[lane] < known && values[below[lane]] == x[lane];
    if (has_equal)
        count_below(values, known, x, not_above, 1, lanes);
    for (int lane = 0; lane < lanes; lane++) {
        both[lane] = below[lane] + (has_equal ? not_above : below)[lane];
        ranks[lane] = isfinite(x[lane]) ? rank_of(both[lane], known) : 0.5;
    }
}

/* Return the number of a normal distribution that has a rank, by the approximation sigmoid(1.702 x). */
static inline double normal_number(double rank) { return log(rank / (1 - rank)) / 1.702; }

/* Return the shift by which values are sampled once there are `count` of them: every 2^shift-th value is. */
static inline int64_t sampling_shift(int64_t count, int64_t sample_size, int64_t max_shift)
{
    int64_t shift = 0;
    while (shift < max_shift && sample_size << (shift + 1) <= count)
        shift++;
    return shift;
}

#endif
