// Sums, products, extremes of NCCL's types, in the order of ranks: all ranks get the same bits.

#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Half.h>

// nccl.h includes CUDA's small types, which want a compiler of CUDA and are used nowhere in it: torch's serve here.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace emulated {

inline size_t size_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
        case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
        default: return 0;
    }
}

struct Reduction {
    ncclRedOp_t op;       // one of the five that NCCL has by itself; of its own ones, ncclSum
    bool scaled = false;  // each value is multiplied before the sum (ncclRedOpCreatePreMulSum)
    double factor = 1;
};

namespace detail {

// Types of 16 and 8 bits compute in float and are rounded after each step, as NCCL's kernels do.
template <class T> struct Compute { using type = T; };
template <> struct Compute<c10::Half> { using type = float; };
template <> struct Compute<c10::BFloat16> { using type = float; };
template <> struct Compute<c10::Float8_e4m3fn> { using type = float; };
template <> struct Compute<c10::Float8_e5m2> { using type = float; };

template <class T> void reduce(const Reduction& by, const unsigned char* const* inputs, int ranks, unsigned char* output, size_t count) {
    using C = typename Compute<T>::type;
    auto* result = reinterpret_cast<T*>(output);
    for (size_t i = 0; i < count; ++i) {
        auto value = [&](int rank) {
            C one = static_cast<C>(reinterpret_cast<const T*>(inputs[rank])[i]);
            return by.scaled ? static_cast<C>(static_cast<T>(static_cast<C>(one * static_cast<C>(by.factor)))) : one;
        };
        C sum = value(0);
        for (int rank = 1; rank < ranks; ++rank) {
            C next = value(rank);
            switch (by.op) {
                case ncclProd: sum = sum * next; break;
                case ncclMax: sum = std::max(sum, next); break;
                case ncclMin: sum = std::min(sum, next); break;
                default: sum = sum + next;
            }
            sum = static_cast<C>(static_cast<T>(sum));
        }
        if (by.op == ncclAvg) sum = sum / static_cast<C>(ranks);
        result[i] = static_cast<T>(sum);
    }
}

}  // namespace detail

// `output` may be one of `inputs`.
inline void reduce(ncclDataType_t type, const Reduction& by, const unsigned char* const* inputs, int ranks, unsigned char* output, size_t count) {
    switch (type) {
        case ncclInt8: return detail::reduce<int8_t>(by, inputs, ranks, output, count);
        case ncclUint8: return detail::reduce<uint8_t>(by, inputs, ranks, output, count);
        case ncclInt32: return detail::reduce<int32_t>(by, inputs, ranks, output, count);
        case ncclUint32: return detail::reduce<uint32_t>(by, inputs, ranks, output, count);
        case ncclInt64: return detail::reduce<int64_t>(by, inputs, ranks, output, count);
        case ncclUint64: return detail::reduce<uint64_t>(by, inputs, ranks, output, count);
        case ncclFloat16: return detail::reduce<c10::Half>(by, inputs, ranks, output, count);
        case ncclBfloat16: return detail::reduce<c10::BFloat16>(by, inputs, ranks, output, count);
        case ncclFloat32: return detail::reduce<float>(by, inputs, ranks, output, count);
        case ncclFloat64: return detail::reduce<double>(by, inputs, ranks, output, count);
        case ncclFloat8e4m3: return detail::reduce<c10::Float8_e4m3fn>(by, inputs, ranks, output, count);
        case ncclFloat8e5m2: return detail::reduce<c10::Float8_e5m2>(by, inputs, ranks, output, count);
        default: return;
    }
}

}  // namespace emulated
