// The hash maps with which benchmarks/id_index.py compares the index of DynamicEmbedding: batches of ids are looked up,
// and missing ids get the next row. Compiled once for each map, with -DMAP=1 (absl) or -DMAP=2 (boost).
#include <cstdint>

#if MAP == 1
#include <absl/container/flat_hash_map.h>
using map = absl::flat_hash_map<uint64_t, uint32_t>;
#else
#include <boost/unordered/unordered_flat_map.hpp>
using map = boost::unordered_flat_map<uint64_t, uint32_t>;
#endif

extern "C" map *create() { return new map; }
extern "C" void destroy(map *x) { delete x; }

extern "C" void insert(map *x, const uint64_t *ids, int64_t n, int64_t *rows)
{
    for (int64_t i = 0; i < n; i++)
        rows[i] = x->try_emplace(ids[i], (uint32_t)x->size() + 1).first->second;
}

extern "C" void find(const map *x, const uint64_t *ids, int64_t n, int64_t *rows)
{
    for (int64_t i = 0; i < n; i++) {
        const auto found = x->find(ids[i]);
        rows[i] = found == x->end() ? 0 : found->second;
    }
}

// The bytes of the map's arrays: slots of 16 bytes and one byte of control data for each.
extern "C" int64_t bytes(const map *x) { return (int64_t)x->bucket_count() * 17; }
