#version 450
#extension GL_GOOGLE_include_directive : enable
// Scale and zero point of each row, from its smallest and its largest number. A workgroup takes one
// row.
//
// Buffers: a [rows, K], scale [rows], zero [rows] (the zero points).
// Macros:
//   T_A, T_SCALE, T_ZERO  element types
//   VEC4_A        1: K, the stride and the offset are multiples of 4
//   SCALE, ZERO   expressions over a (the smallest number), b (the largest), low, high, eps,
//                 middle; ZERO also over s, the scale
//   LX, SUBGROUP  as in qmatvec.comp
//   AHEAD         elements, or vec4s, that an invocation reads before it uses the first of them (1)
// Grid: (rows), spread over y
#include "core/common.glslh"
#pragma purevk macro HAS_8BIT
#ifdef HAS_8BIT
#extension GL_EXT_shader_8bit_storage : require
#endif
#ifdef HAS_INT64
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#endif
#ifndef T_A
#define T_A float
#endif
#ifndef T_SCALE
#define T_SCALE float
#endif
#ifndef T_ZERO
#define T_ZERO int
#endif
#ifndef VEC4_A
#define VEC4_A 0
#endif
#ifndef SCALE
#define SCALE pv_scale(a, b, low, high, eps)
#endif
#ifndef ZERO
#define ZERO pv_zero(a, s, low, high)
#endif
#ifndef LX
#define LX 32
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#ifndef SUBGROUP
#define SUBGROUP 0
#endif
#if SUBGROUP
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif
#include "core/math.glslh"

PARAM(0, rows)
PARAM(1, K)
PARAM(2, stride)     // of the rows of x
PARAM(3, low_bits)   // smallest quantized value, the bits of a float
PARAM(4, high_bits)  // largest quantized value (bits)
PARAM(5, eps_bits)   // smallest scale (bits)
PARAM(6, middle)     // zero point of symmetric quantization
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(7, offset)  // of x

layout(local_size_x = LX, local_size_y = 1, local_size_z = 1) in;
#if VEC4_A
READONLY_BUFFER(0, a, VEC4_OF(T_A))
#else
READONLY_BUFFER(0, a, T_A)
#endif
WRITEONLY_BUFFER(1, scale, T_SCALE)
WRITEONLY_BUFFER(2, zero, T_ZERO)

#if SUBGROUP == 0
#define PARTS LX
#else
#define PARTS (LX / SUBGROUP)
#endif
shared vec2 parts[PARTS];

#if VEC4_A
#define EACH 4
#define V vec4
void take(vec4 v, inout float least, inout float most) {
    least = min(min(min(least, v.x), min(v.y, v.z)), v.w);
    most = max(max(max(most, v.x), max(v.y, v.z)), v.w);
}
#else
#define EACH 1
#define V float
void take(float v, inout float least, inout float most) {
    least = min(least, v);
    most = max(most, v);
}
#endif

LOOPS(loop(ceil(K, LX)) + loop(LX))

void main() {
    int row = int(WORKGROUP_ID.x + WORKGROUP_ID.y * gl_NumWorkGroups.x), lane = int(gl_LocalInvocationIndex);
    if (row >= rows) return;
    float a = PV_INF, b = -PV_INF;
    int k = lane * EACH;
#if AHEAD > 1
    for (; k + (AHEAD - 1) * LX * EACH < K; k += AHEAD * LX * EACH) {
        V v[AHEAD];
        UNROLL for (int i = 0; i < AHEAD; i++) v[i] = V(buf_a[(offset + row * stride + k + i * LX * EACH) / EACH]);
        UNROLL for (int i = 0; i < AHEAD; i++) take(v[i], a, b);
    }
#endif
    for (; k < K; k += LX * EACH) take(V(buf_a[(offset + row * stride + k) / EACH]), a, b);
#if SUBGROUP
    a = subgroupMin(a);
    b = subgroupMax(b);
    if (subgroupElect()) parts[gl_SubgroupID] = vec2(a, b);
#else
    parts[lane] = vec2(a, b);
#endif
    barrier();
    if (lane != 0) return;
    for (int p = 0; p < PARTS; p++) {
        a = min(a, parts[p].x);
        b = max(b, parts[p].y);
    }
    float low = intBitsToFloat(low_bits), high = intBitsToFloat(high_bits), eps = intBitsToFloat(eps_bits);
    float s = SCALE;
    buf_scale[row] = T_SCALE(s);
    // Not T_ZERO(ZERO): older compilers cannot make a specialization constant a byte.
    int zero = ZERO;
    buf_zero[row] = T_ZERO(zero);
}
