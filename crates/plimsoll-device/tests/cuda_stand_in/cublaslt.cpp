// libcublasLt of the stand-in: matrix products of f32 and bf16 with f32 sums, in several algorithms with different
// summation orders and workspaces. Matrices are column-major, as in cuBLASLt.

#include "stand_in.h"

#include <math.h>

#include <algorithm>
#include <array>
#include <set>

namespace {

using stand_in::Address;

constexpr int SUCCESS = 0, NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15;
constexpr int R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14;
constexpr int COMPUTE_32F = 68, COMPUTE_32F_PEDANTIC = 69, FAST_16BF = 75, FAST_TF32 = 77;
constexpr int EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4;
constexpr uint64_t CHARGE = 8 * stand_in::MIB, KERNEL = stand_in::MIB / 64;

struct Handle {
    stand_in::Gpu* gpu;
};

struct Desc {
    int compute, scale, pointer_mode = 0, transpose_a = 0, transpose_b = 0, epilogue = EPILOGUE_DEFAULT, bias_type = -1;
    Address bias = 0;
};

struct Layout {
    int type, order = 0;
    uint64_t rows, columns;
    int64_t ld;
    int batches = 1;
};

struct Preference {
    uint64_t workspace = 0;
};

// An algorithm sums k in `parts` parts, forwards or backwards, and then the parts.
struct Algorithm {
    int id;
    int parts;
    bool reverse;
};
constexpr Algorithm ALGORITHMS[] = {{20, 1, false}, {21, 4, false}, {66, 1, true}, {71, 2, true}};

struct Algo {
    uint64_t id, tile, parts, stages, sizes, rest[3];
};
static_assert(sizeof(Algo) == 64, "cublasLtMatmulAlgo_t");

struct Heuristic {
    Algo algo;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

uint64_t size_of(int type) { return type == R_64F ? 8 : type == R_32F ? 4 : 2; }

float get(const void* from, int type, uint64_t at) {
    if (type == R_32F) return ((const float*)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t*)from)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

void put(float x, void* to, int type, uint64_t at) {
    if (type == R_32F) {
        ((float*)to)[at] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    ((uint16_t*)to)[at] = (uint16_t)(nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

struct Product {
    uint64_t m, n, k;
    Desc desc;
    Layout a, b, c, d;
    const Algorithm* algorithm;
    uint64_t workspace;
};

const Algorithm* find(uint64_t id) {
    for (const Algorithm& algorithm : ALGORITHMS)
        if ((uint64_t)algorithm.id == id) return &algorithm;
    return nullptr;
}

// Checks that a product is valid and supported here, and describes it in `product`.
int examine(const Desc* desc, const Layout* a, const Layout* b, const Layout* c, const Layout* d, Product& product) {
    if (!desc || !a || !b || !c || !d) return INVALID_VALUE;
    product = {d->rows, d->columns, desc->transpose_a ? a->rows : a->columns, *desc, *a, *b, *c, *d, nullptr, 0};
    uint64_t a_rows = desc->transpose_a ? a->columns : a->rows;
    uint64_t b_rows = desc->transpose_b ? b->columns : b->rows, b_columns = desc->transpose_b ? b->rows : b->columns;
    if (a_rows != d->rows || b_rows != product.k || b_columns != d->columns) return INVALID_VALUE;
    if (c->rows != d->rows || c->columns != d->columns || c->type != d->type) return INVALID_VALUE;
    for (const Layout* layout : {a, b, c, d}) {
        if (layout->order != 0 || layout->batches != 1) return NOT_SUPPORTED;
        if (layout->ld < (int64_t)layout->rows) return INVALID_VALUE;
        if (layout->type != R_32F && layout->type != R_16BF) return NOT_SUPPORTED;
    }
    if (a->type != b->type || desc->scale != R_32F) return NOT_SUPPORTED;
    if (a->type == R_32F && d->type != R_32F) return NOT_SUPPORTED;
    bool single = desc->compute == COMPUTE_32F || desc->compute == COMPUTE_32F_PEDANTIC;
    bool fast = desc->compute == FAST_TF32 || desc->compute == FAST_16BF;
    if (!(single || (fast && a->type == R_32F))) return NOT_SUPPORTED;
    if (desc->epilogue != EPILOGUE_DEFAULT && desc->epilogue != EPILOGUE_BIAS) return NOT_SUPPORTED;
    return SUCCESS;
}

uint64_t workspace_of(const Product& product, const Algorithm& algorithm) {
    return algorithm.parts == 1 ? 0 : (uint64_t)algorithm.parts * product.m * product.n * 4;
}

// Bits of a float that TF32 and bf16 arithmetic keep.
float rounded(float x, int compute) {
    int keep = compute == FAST_TF32 ? 10 : compute == FAST_16BF ? 7 : 23;
    if (keep == 23) return x;
    uint32_t bits, drop = 23 - keep;
    memcpy(&bits, &x, 4);
    bits = (bits + (1u << (drop - 1)) - 1 + ((bits >> drop) & 1)) & ~((1u << drop) - 1);
    memcpy(&x, &bits, 4);
    return x;
}

// Converts matrices to floats, contiguous along k, so that products are sums over rows.
std::vector<float> along_k(const void* from, const Layout& layout, bool k_is_rows, uint64_t outer, uint64_t k, int compute) {
    std::vector<float> out(outer * k);
    for (uint64_t o = 0; o < outer; o++)
        for (uint64_t i = 0; i < k; i++) {
            uint64_t at = k_is_rows ? i + o * (uint64_t)layout.ld : o + i * (uint64_t)layout.ld;
            out[o * k + i] = rounded(get(from, layout.type, at), compute);
        }
    return out;
}

void multiply(const Product& p, float alpha, const void* a, const void* b, float beta, const void* c, void* d, void* workspace) {
    // The whole workspace is overwritten, whatever it contained.
    if (p.workspace) memset(workspace, 0xff, p.workspace);
    std::vector<float> left = along_k(a, p.a, p.desc.transpose_a != 0, p.m, p.k, p.desc.compute);
    std::vector<float> right = along_k(b, p.b, p.desc.transpose_b == 0, p.n, p.k, p.desc.compute);
    uint64_t parts = (uint64_t)p.algorithm->parts, length = (p.k + parts - 1) / parts;
    for (uint64_t j = 0; j < p.n; j++)
        for (uint64_t i = 0; i < p.m; i++) {
            float total = 0;
            for (uint64_t part = 0; part < parts; part++) {
                uint64_t from = std::min(p.k, part * length), end = std::min(p.k, from + length);
                const float *x = &left[i * p.k], *y = &right[j * p.k];
                float lanes[8] = {};
                uint64_t at = from;
                for (; at + 8 <= end; at += 8)
                    for (int l = 0; l < 8; l++) lanes[l] += x[at + l] * y[at + l];
                float sum = 0;
                for (int l = 0; l < 8; l++) sum += lanes[p.algorithm->reverse ? 7 - l : l];
                for (; at < end; at++) sum += x[at] * y[at];
                if (parts > 1) ((float*)workspace)[(part * p.n + j) * p.m + i] = sum;
                total += sum;
            }
            float value = alpha * total;
            if (beta != 0) value += beta * get(c, p.c.type, i + j * (uint64_t)p.c.ld);
            if (p.desc.epilogue == EPILOGUE_BIAS) value += get((const void*)p.desc.bias, p.desc.bias_type < 0 ? p.d.type : p.desc.bias_type, i);
            put(value, d, p.d.type, i + j * (uint64_t)p.d.ld);
        }
}

}  // namespace

EXPORT const char* cublasLtGetStatusName(int code) {
    switch (code) {
        case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
        case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "CUBLAS_STATUS";
}
EXPORT const char* cublasLtGetStatusString(int code) { return cublasLtGetStatusName(code); }
EXPORT size_t cublasLtGetVersion() { return 130200; }
EXPORT size_t cublasLtGetCudartVersion() { return 13020; }

EXPORT int cublasLtCreate(Handle** handle) {
    std::lock_guard<std::recursive_mutex> guard(stand_in::lock);
    if (!stand_in::current()) return NOT_INITIALIZED;
    if (!stand_in::charge(*stand_in::current()->gpu, CHARGE)) return ALLOC_FAILED;
    *handle = new Handle{stand_in::current()->gpu};
    return SUCCESS;
}

EXPORT int cublasLtDestroy(Handle* handle) {
    std::lock_guard<std::recursive_mutex> guard(stand_in::lock);
    handle->gpu->charges -= CHARGE;
    delete handle;
    return SUCCESS;
}

EXPORT int cublasLtMatmulDescCreate(Desc** desc, int compute, int scale) {
    *desc = new Desc{compute, scale};
    return SUCCESS;
}

EXPORT int cublasLtMatmulDescDestroy(Desc* desc) {
    delete desc;
    return SUCCESS;
}

template <class T> static int set(T& to, const void* from, size_t size) {
    if (size != sizeof(T)) return INVALID_VALUE;
    memcpy(&to, from, size);
    return SUCCESS;
}

EXPORT int cublasLtMatmulDescSetAttribute(Desc* desc, int attribute, const void* value, size_t size) {
    switch (attribute) {
        case 0: return set(desc->compute, value, size);
        case 1: return set(desc->scale, value, size);
        case 2: return set(desc->pointer_mode, value, size);
        case 3: return set(desc->transpose_a, value, size);
        case 4: return set(desc->transpose_b, value, size);
        case 7: return set(desc->epilogue, value, size);
        case 8: return set(desc->bias, value, size);
        case 26: return set(desc->bias_type, value, size);
    }
    return NOT_SUPPORTED;
}

EXPORT int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    *layout = new Layout{type, 0, rows, columns, ld};
    return SUCCESS;
}

EXPORT int cublasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return SUCCESS;
}

EXPORT int cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t size) {
    switch (attribute) {
        case 0: return set(layout->type, value, size);
        case 1: return set(layout->order, value, size);
        case 2: return set(layout->rows, value, size);
        case 3: return set(layout->columns, value, size);
        case 4: return set(layout->ld, value, size);
        case 5: return set(layout->batches, value, size);
    }
    return NOT_SUPPORTED;
}

EXPORT int cublasLtMatmulPreferenceCreate(Preference** preference) {
    *preference = new Preference;
    return SUCCESS;
}

EXPORT int cublasLtMatmulPreferenceDestroy(Preference* preference) {
    delete preference;
    return SUCCESS;
}

EXPORT int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t size) {
    if (attribute == 1) return set(preference->workspace, value, size);
    return SUCCESS;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(Handle*, Desc* desc, Layout* a, Layout* b, Layout* c, Layout* d, Preference* preference,
                                          int wanted, Heuristic* results, int* found) {
    Product product;
    *found = 0;
    if (int code = examine(desc, a, b, c, d, product)) return code;
    for (const Algorithm& algorithm : ALGORITHMS) {
        uint64_t workspace = workspace_of(product, algorithm);
        if (*found == wanted || workspace > preference->workspace) continue;
        Heuristic& result = results[(*found)++];
        memset(&result, 0, sizeof result);
        result.algo = {(uint64_t)algorithm.id, 0, (uint64_t)algorithm.parts, 0, 0, {}};
        result.workspace = workspace;
        result.waves = 1;
    }
    return *found ? SUCCESS : NOT_SUPPORTED;
}

EXPORT int cublasLtMatmulAlgoInit(Handle*, int, int, int, int, int, int, int id, Algo* algo) {
    const Algorithm* algorithm = find((uint64_t)id);
    if (!algorithm) return INVALID_VALUE;
    *algo = {(uint64_t)id, 0, 1, 0, 0, {}};
    return SUCCESS;
}

// id, tile, parts of k (splitK), stages; other attributes are 0 here.
static uint64_t* place(Algo* algo, int attribute) {
    switch (attribute) {
        case 0: return &algo->id;
        case 1: return &algo->tile;
        case 2: return &algo->parts;
        case 6: return &algo->stages;
    }
    return nullptr;
}

EXPORT int cublasLtMatmulAlgoConfigGetAttribute(const Algo* algo, int attribute, void* value, size_t size, size_t* written) {
    uint64_t* at = place((Algo*)algo, attribute);
    uint64_t held = at ? *at : 0;
    // The last two attributes have 16 bits, the others 32.
    size_t needed = attribute >= 7 ? 2 : 4;
    if (written) *written = needed;
    if (size == 0) return SUCCESS;
    if (size < needed) return INVALID_VALUE;
    memcpy(value, &held, needed);
    return SUCCESS;
}

EXPORT int cublasLtMatmulAlgoConfigSetAttribute(Algo* algo, int attribute, const void* value, size_t size) {
    uint64_t held = 0;
    memcpy(&held, value, std::min(size, sizeof held));
    uint64_t* at = place(algo, attribute);
    if (at) *at = held;
    return at || held == 0 ? SUCCESS : INVALID_VALUE;
}

EXPORT int cublasLtMatmulAlgoCheck(Handle*, Desc* desc, Layout* a, Layout* b, Layout* c, Layout* d, const Algo* algo, Heuristic* result) {
    Product product;
    if (int code = examine(desc, a, b, c, d, product)) return code;
    const Algorithm* algorithm = find(algo->id);
    if (!algorithm || algo->parts != (uint64_t)algorithm->parts) return NOT_SUPPORTED;
    memset(result, 0, sizeof *result);
    result->algo = *algo;
    result->workspace = workspace_of(product, *algorithm);
    result->waves = 1;
    return SUCCESS;
}

EXPORT int cublasLtMatmul(Handle* handle, Desc* desc, const float* alpha, const void* a, Layout* a_layout, const void* b, Layout* b_layout,
                          const float* beta, const void* c, Layout* c_layout, void* d, Layout* d_layout, const Algo* algo, void* workspace,
                          size_t workspace_bytes, void* stream) {
    std::lock_guard<std::recursive_mutex> guard(stand_in::lock);
    Product product;
    if (!handle) return NOT_INITIALIZED;
    // On a lost device the library cannot load a kernel, and does not state the cause.
    if (stand_in::lost) return ALLOC_FAILED;
    if (int code = examine(desc, a_layout, b_layout, c_layout, d_layout, product)) return code;
    // Without an algorithm the library would choose one itself, which no plan knows.
    product.algorithm = algo ? find(algo->id) : nullptr;
    if (!product.algorithm || algo->parts != (uint64_t)product.algorithm->parts) return NOT_SUPPORTED;
    product.workspace = workspace_of(product, *product.algorithm);
    if (product.workspace > workspace_bytes) return INVALID_VALUE;
    if (desc->pointer_mode != 0) return NOT_SUPPORTED;
    if (product.workspace && (Address)workspace % 16) return INVALID_VALUE;
    for (const void* matrix : {a, b, c, (const void*)d})
        if ((Address)matrix % size_of(a_layout->type)) return INVALID_VALUE;
    // The library's own kernels are loaded at first use and stay; other sizes have other kernels.
    static std::set<std::array<uint64_t, 6>> loaded;
    auto scale = [](uint64_t size) { return (uint64_t)ilogb((double)size); };
    std::array<uint64_t, 6> kernel = {(uint64_t)handle->gpu->number, algo->id, (uint64_t)product.a.type, (uint64_t)product.d.type,
                                      (uint64_t)(desc->transpose_a * 2 + desc->transpose_b), scale(product.m) * 64 + scale(product.n)};
    if (!loaded.count(kernel)) {
        if (!stand_in::charge(*handle->gpu, KERNEL)) return ALLOC_FAILED;
        loaded.insert(kernel);
    }
    float with_alpha = *alpha, with_beta = *beta;
    int code = stand_in::enqueue(stream, "a product",
                                 [=] { multiply(product, with_alpha, a, b, with_beta, c, d, workspace); });
    return code == 0 ? SUCCESS : EXECUTION_FAILED;
}
