#version 450
#extension GL_GOOGLE_include_directive : enable
#if defined(COOPMAT) && COOPMAT
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#if defined(BFLOAT16) && BFLOAT16
#extension GL_EXT_bfloat16 : require
#endif
#endif
// 2-D convolution as an implicit matmul by tiles in shared memory: for GPUs. Images are NHWC.
//
// Buffers and parameters: as conv2d.comp, and with SPLIT_K how K = KH * KW * (IC rounded up to a
//   multiple of 4) is split.
// Macros: those of matmul_sizes.glslh and matmul_io.glslh, and
//   VEC4_*  as in conv2d.comp
//   VEC8_A, VEC8_B  both or none, with COOPMAT: IC and, without B_TRANSPOSED, OC are multiples of 8
//   B_TRANSPOSED  1: the weight is [OC of all groups, KH, KW, IC], and ldb is KH * KW * IC
//   SPLIT_K  1: the sums of each split go to out, float [groups, splits, batches * OH * OW, OC],
//     without bias or epilogue, for matmul_reduce.comp. T_OUT is float then, VEC4_OUT follows from
//     OC % 4, and there batch_o is OC.
// The epilogue gets b = 0, m = output pixel (batch * OH + y) * OW + x, and n = output channel among
// those of all groups.
// Local size: LOCAL of matmul_sizes.glslh.
// Grid: (ceil(OC / TILE_N), ceil(batches * OH * OW / TILE_M), groups), or groups * splits
//   (z = group * splits + split)
#include "core/common.glslh"
#include "matmul/matmul_sizes.glslh"

PARAM(0, batches)
PARAM(1, H)
PARAM(2, W)
PARAM(3, IC)
PARAM(4, OH)
PARAM(5, OW)
PARAM(6, OC)
PARAM(7, pixel_a)
PARAM(8, pixel_o)
PARAM(9, ldb)
PARAM(10, KH)
PARAM(11, KW)
PARAM(12, stride_y)
PARAM(13, stride_x)
PARAM(14, pad_y)
PARAM(15, pad_x)
PARAM(16, dilation_y)
PARAM(17, dilation_x)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(18, offset_a)
PARAM(19, offset_b)
PARAM(20, offset_o)
PARAM(21, offset_bias)
#if SPLIT_K
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 1
PARAM(22, splits)
PARAM(23, split_size)  // K of one split, a multiple of TILE_K
#endif

#include "matmul/matmul_io.glslh"

int first_channel, base_o, pitch, k_last;
// For the rows that this invocation loads: coordinates and address of tap (0, 0), and the present
// tap and channel.
int row_y[A_SLOTS], row_x[A_SLOTS], row_at[A_SLOTS];
int tap_y, tap_x, tap_at, channel;
bool tap_there;

// The input channels of a tap, padded to a multiple of 4, so that 4 neighbours along K belong to
// one tap.
int padded_channels() {
#if VEC4_A || VEC8_A
    return IC;
#else
    return (IC + 3) & ~3;
#endif
}

void a_row(int slot, int m) {
    m = min(m, batches * OH * OW - 1);
    int row = m / OW, image = row / OH;
    row_y[slot] = (row - image * OH) * stride_y - pad_y;
    row_x[slot] = (m - row * OW) * stride_x - pad_x;
    row_at[slot] += ((image * H + row_y[slot]) * W + row_x[slot]) * pixel_a;
}

void a_column(int k) {
    int padded = padded_channels(), tap = k / padded, ky = tap / KW;
    channel = k - tap * padded;
    tap_y = ky * dilation_y;
    tap_x = (tap - ky * KW) * dilation_x;
    tap_at = (tap_y * W + tap_x) * pixel_a + channel;
    tap_there = k < k_last;
}

LOADED_VECTOR a_load(int slot) {
    LOADED_VECTOR v = LOADED_VECTOR(0.0);
    int y = row_y[slot] + tap_y, x = row_x[slot] + tap_x, at = row_at[slot] + tap_at;
    if (tap_there && y >= 0 && y < H && x >= 0 && x < W) {
#if WIDTH == 8
        v = buf_a[at >> 3];
#elif VEC4_A
        v = LOADED_VECTOR(QUAD_A(at));
#else
        vec4 four = vec4(READ_A(at), 0.0, 0.0, 0.0);
        if (channel + 1 < IC) four.y = READ_A(at + 1);
        if (channel + 2 < IC) four.z = READ_A(at + 2);
        if (channel + 3 < IC) four.w = READ_A(at + 3);
        v = LOADED_FROM(four);
#endif
    }
    return v;
}

LOADED_VECTOR load_b(int k, int n) {
    LOADED_VECTOR v = LOADED_VECTOR(0.0);
#if VEC4_A || VEC8_A
    int row = k;
    bool there = k < k_last;
#else
    int padded = padded_channels(), tap = k / padded, c = k - tap * padded, row = tap * IC + c;
    bool there = k < k_last && c < IC;
#endif
    if (there) {
        int at = offset_b + row * ldb + first_channel;
#if WIDTH == 8
        v = buf_b[(at + min(n, OC - 8)) >> 3];
#elif VEC4_B
        v = LOADED_VECTOR(QUAD_B(at + min(n, OC - 4)));
#else
        int last = OC - 1;
        v = LOADED_FROM(vec4(READ_B(at + min(n, last)), READ_B(at + min(n + 1, last)),
                             READ_B(at + min(n + 2, last)), READ_B(at + min(n + 3, last))));
#endif
    }
    return v;
}

// The weight is [OC of all groups, KH, KW, IC], and ldb the elements of an output channel.
LOADED_VECTOR load_bt(int n, int k) {
    LOADED_VECTOR v = LOADED_VECTOR(0.0);
    int at = offset_b + (first_channel + min(n, OC - 1)) * ldb;
#if WIDTH == 8
    if (k < k_last) v = buf_b[(at + k) >> 3];
#elif VEC4_A && VEC4_B
    if (k < k_last) v = LOADED_VECTOR(QUAD_B(at + k));
#else
    int padded = padded_channels(), tap = k / padded, c = k - tap * padded;
    vec4 four = vec4(0.0);
    UNROLL for (int i = 0; i < 4; i++) {
#if VEC4_B
        if (k < k_last && c + i < IC) four[i] = READ4_B(at + tap * IC + c)[i];
#else
        if (k < k_last && c + i < IC) four[i] = READ_B(at + tap * IC + c + i);
#endif
    }
    v = LOADED_FROM(four);
#endif
    return v;
}

int tile_rows() {
    return batches * OH * OW;
}

int tile_columns() {
    return OC;
}

vec4 tile_bias(int n) {
    return bias4(first_channel + n, first_channel + OC);
}

vec4 tile_value(int m, int n, vec4 v) {
    return value4(v, 0, m, first_channel + n);
}

EXTRAS tile_extras(int m, int n) {
    return extras4(0, m, first_channel + n);
}

vec4 tile_value(int m, int n, vec4 v, EXTRAS e) {
    return value4(v, e, 0, m, first_channel + n);
}

void tile_store(int m, int n, vec4 v) {
    put4(v, base_o + m * pitch + n, 0, m, first_channel + n, first_channel + OC);
}

#if COOPMAT
#include "matmul/matmul_coopmat.glslh"
#else
#include "matmul/matmul_shared.glslh"
#endif

#if SPLIT_K
LOOPS(loop(ceil(split_size, TILE_K)))
#else
LOOPS(loop(ceil(KH * KW * (IC + 4), TILE_K)))
#endif

void main() {
    int z = int(WORKGROUP_ID.z), k_first = 0;
    k_last = KH * KW * padded_channels();
#if SPLIT_K
    int group = z / splits, part = z - group * splits;
    k_first = part * split_size;
    k_last = min(k_last, k_first + split_size);
#else
    int group = z;
#endif
    first_channel = group * OC;
    UNROLL for (int s = 0; s < A_SLOTS; s++) row_at[s] = offset_a + group * IC;
#if SPLIT_K
    base_o = offset_o + z * tile_rows() * OC;
    pitch = OC;
#else
    base_o = offset_o + first_channel;
    pitch = pixel_o;
#endif
    tile_multiply(int(WORKGROUP_ID.y) * TILE_M, int(WORKGROUP_ID.x) * TILE_N, k_first, k_last);
}
