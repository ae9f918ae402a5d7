// What a step of rows of 64 touches in memory, and nothing else: the lower bound that benchmarks/row_traffic.py times.
#include <cuda_runtime.h>
#include <stdint.h>

enum { FLOAT32, BFLOAT16, INT8 };

// A warp has ROWS rows to read and write, and GRADS gradients to read, which lie where `order` says or one after the other.
template <int STORAGE, int ROWS, int GRADS>
__global__ void touch(float *p, float *m, float *v, uint8_t *codes, uint16_t *scales, const float *grads, const int *ids,
                      const int64_t *order, int rows, int count)
{
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, lane = threadIdx.x & 31;
    const int first = warp * ROWS, from = warp * GRADS;
    const int id = lane < ROWS && first + lane < rows ? ids[first + lane] : 0;
    int64_t place = from + lane;
    if (order)
        place = lane < GRADS && from + lane < count ? order[from + lane] : 0;
    float2 P[ROWS], M[ROWS], V[ROWS], sum = make_float2(0, 0);
    uint32_t bytes[ROWS];
    uint2 halves[ROWS];
    uint16_t scale[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int64_t row = __shfl_sync(~0u, id, r);
        if (first + r >= rows)
            continue;
        P[r] = ((const float2 *)(p + row * 64))[lane];
        if (STORAGE == FLOAT32)
            M[r] = ((const float2 *)(m + row * 64))[lane], V[r] = ((const float2 *)(v + row * 64))[lane];
        if (STORAGE == BFLOAT16)
            halves[r] = ((const uint2 *)(codes + row * 256))[lane];
        if (STORAGE == INT8)
            bytes[r] = ((const uint32_t *)(codes + row * 128))[lane], scale[r] = scales[row];
    }
#pragma unroll
    for (int k = 0; k < GRADS; k++) {
        const int64_t at = __shfl_sync(~0u, place, k);
        if (from + k < count) {
            const float2 g = ((const float2 *)(grads + at * 64))[lane];
            sum.x += g.x, sum.y += g.y;
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int64_t row = __shfl_sync(~0u, id, r);
        if (first + r >= rows)
            continue;
        if (STORAGE == FLOAT32) {
            ((float2 *)(m + row * 64))[lane] = make_float2(M[r].x + sum.x, M[r].y + sum.y);
            ((float2 *)(v + row * 64))[lane] = make_float2(V[r].x + sum.y, V[r].y + sum.x);
        }
        if (STORAGE == BFLOAT16)
            ((uint2 *)(codes + row * 256))[lane] = make_uint2(halves[r].x ^ (uint32_t)sum.x, halves[r].y ^ (uint32_t)sum.y);
        if (STORAGE == INT8) {
            bytes[r] ^= (uint32_t)(sum.x + sum.y);
            ((uint32_t *)(codes + row * 128))[lane] = bytes[r];
            if (lane == 0)
                scales[row] = scale[r] ^ (uint16_t)bytes[r];
        }
        ((float2 *)(p + row * 64))[lane] = make_float2(P[r].x + sum.x, P[r].y + sum.y);
    }
}

extern "C" int row_traffic(int storage, float *p, float *m, float *v, uint8_t *codes, uint16_t *scales, const float *grads,
                           const int *ids, const int64_t *order, int rows, int count, cudaStream_t stream)
{
    const int each = order ? 9 : 4, by_rows = (rows + 3) / 4, by_grads = (count + each - 1) / each;
    const int blocks = ((by_rows > by_grads ? by_rows : by_grads) + 3) / 4;
#define TOUCH(storage, grads_each)                                                                                     \
    touch<storage, 4, grads_each><<<blocks, 128, 0, stream>>>(p, m, v, codes, scales, grads, ids, order, rows, count)
    if (storage == FLOAT32)
        order ? (TOUCH(FLOAT32, 9)) : (TOUCH(FLOAT32, 4));
    if (storage == BFLOAT16)
        order ? (TOUCH(BFLOAT16, 9)) : (TOUCH(BFLOAT16, 4));
    if (storage == INT8)
        order ? (TOUCH(INT8, 9)) : (TOUCH(INT8, 4));
    return cudaGetLastError();
}
