/* Hash functions of 64 bits, for feature hashing and for the index of DynamicEmbedding. */
#ifndef CADAM_HASHING_H
#define CADAM_HASHING_H

#include <stdint.h>

/* The finalizer of splitmix64. It spreads 64-bit integers evenly, so that any of their bits can be used to choose a place
 * in a table. Different integers have different results. */
static inline uint64_t mix_splitmix64(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

/* FNV-1a with 64 bits. `fnv1a` in online/data/conversion.py computes the same. */
static inline uint64_t fnv1a(const uint8_t *s, int64_t size)
{
    uint64_t hash = 0xcbf29ce484222325;
    for (int64_t i = 0; i < size; i++)
        hash = (hash ^ s[i]) * 0x100000001b3;
    return hash;
}

#endif
