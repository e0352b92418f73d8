#version 450
#extension GL_GOOGLE_include_directive : enable
// The product with a quantized weight for few rows, as in decoding: W is read once, at the speed of memory. The
// invocations along x share K, each row of them makes 4 columns.
//
// Bindings, macros: qmatmul_io.glslh. Parameters: qmatmul_params.glslh. Further macros:
//   ROWS   rows of A at a time (1)
//   WORDS  words of W read at once: 4, 2 or 1; a row of W has a multiple of them, and so has a group.
//   ANY_GROUP 1: groups of any length; an invocation takes whole groups (WORDS is 1).
//   LX, WY local size (32, 1)
//   SUBGROUP 1: LX is the size of a subgroup, which adds up by itself.
// Grid: (ceil(N / (4 * WY)), ceil(M / ROWS))
#include "common.glslh"
#ifndef ROWS
#define ROWS 1
#endif
#ifndef LX
#define LX 32
#endif
#ifndef WY
#define WY 1
#endif
#ifndef SUBGROUP
#define SUBGROUP 0
#endif
#ifndef ANY_GROUP
#define ANY_GROUP 0
#endif
#if SUBGROUP
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif

#include "qmatmul_params.glslh"

layout(local_size_x = LX, local_size_y = WY, local_size_z = 1) in;

#define PER_WORD (32 / BITS)
#define CHUNK (WORDS * PER_WORD)
#define QUADS (PER_WORD / 4)

#if ACT && !GROUPED
#define T_SUM ivec4
#else
#define T_SUM vec4
#endif
T_SUM total[ROWS];
#if !SUBGROUP
shared T_SUM parts[LX * WY];
#endif

void add_up() {
#if SUBGROUP
    UNROLL for (int r = 0; r < ROWS; r++) total[r] = subgroupAdd(total[r]);
#else
    int lane = int(gl_LocalInvocationID.x), place = int(gl_LocalInvocationID.y) * LX + lane;
    UNROLL for (int r = 0; r < ROWS; r++) {
        parts[place] = total[r];
        barrier();
        for (int half_way = LX / 2; half_way > 0; half_way /= 2) {
            if (lane < half_way) parts[place] += parts[place + half_way];
            barrier();
        }
        total[r] = parts[place - lane];
        barrier();
    }
#endif
}

#if ANY_GROUP
void multiply(int lane, int m0, int n) {
    for (int g = lane; g < groups; g += LX) {
        vec4 scales = scale4(n, g);
        UNROLL for (int r = 0; r < ROWS; r++) {
            int m = min(m0 + r, M - 1);
#if ACT
            ivec4 part = -row_zero(m) * sum4(n, g);
#else
            vec4 part = vec4(0.0);
#endif
            for (int k = g * group; k < min((g + 1) * group, K); k++) {
                ivec4 c;
                UNROLL for (int i = 0; i < 4; i++) c[i] = code_at(offset_w + min(n + i, N - 1) * ldw, k);
#if ACT
                part += bitfieldExtract(a_codes(m, k & ~3), (k & 3) * 8, 8) * c;
#else
                part += a_values(m, k & ~3)[k & 3] * vec4(c);
#endif
            }
            total[r] += scales * vec4(part);
        }
    }
}
#else
#if WORDS == 1
#define WORD(v, j) v
#else
#define WORD(v, j) v[j]
#endif

void multiply(int lane, int m0, int n) {
    int chunks = (K + CHUNK - 1) / CHUNK;
    for (int chunk = lane; chunk < chunks; chunk += LX) {
        int k0 = chunk * CHUNK;
#if WORDS == 4
        uvec4 w[4];
#elif WORDS == 2
        uvec2 w[4];
#else
        uint w[4];
#endif
        UNROLL for (int c = 0; c < 4; c++) w[c] = buf_w[(offset_w + min(n + c, N - 1) * ldw) / WORDS + chunk];
#if ACT
        ivec4 part[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) part[r] = ivec4(0);
        UNROLL for (int j = 0; j < WORDS; j++) {
            UNROLL for (int q = 0; q < QUADS; q++) {
                int k = k0 + j * PER_WORD + q * 4;
                ivec4 b;
                UNROLL for (int c = 0; c < 4; c++) b[c] = code_bytes(WORD(w[c], j) >> (16 * q));
                UNROLL for (int r = 0; r < ROWS; r++) {
                    int a = a_codes(min(m0 + r, M - 1), k);
                    part[r] += ivec4(dot4(a, b.x), dot4(a, b.y), dot4(a, b.z), dot4(a, b.w));
                }
            }
        }
#if GROUPED
        int g = k0 / group;
        vec4 scales = scale4(n, g);
        ivec4 sums = k0 == g * group ? sum4(n, g) : ivec4(0);
        UNROLL for (int r = 0; r < ROWS; r++) {
            total[r] += scales * vec4(part[r] - row_zero(min(m0 + r, M - 1)) * sums);
        }
#else
        UNROLL for (int r = 0; r < ROWS; r++) total[r] += part[r];
#endif
#else
#if GROUPED
        vec4 scales = scale4(n, k0 / group);
#endif
        vec4 part[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) part[r] = vec4(0.0);
        UNROLL for (int j = 0; j < WORDS; j++) {
            UNROLL for (int q = 0; q < QUADS; q++) {
                int k = k0 + j * PER_WORD + q * 4;
                vec4 b[4];
                UNROLL for (int c = 0; c < 4; c++) b[c] = codes(WORD(w[c], j) >> (16 * q));
                UNROLL for (int r = 0; r < ROWS; r++) {
                    vec4 a = a_values(min(m0 + r, M - 1), k);
                    part[r] += vec4(dot(a, b[0]), dot(a, b[1]), dot(a, b[2]), dot(a, b[3]));
                }
            }
        }
#if GROUPED
        UNROLL for (int r = 0; r < ROWS; r++) total[r] += scales * part[r];
#else
        UNROLL for (int r = 0; r < ROWS; r++) total[r] += part[r];
#endif
#endif
    }
}
#endif

void main() {
    int lane = int(gl_LocalInvocationID.x), m0 = int(gl_WorkGroupID.y) * ROWS;
    int n = int(gl_WorkGroupID.x * WY + gl_LocalInvocationID.y) * 4, column = min(n, N - 1);
    UNROLL for (int r = 0; r < ROWS; r++) total[r] = T_SUM(0);
    multiply(lane, m0, column);
    add_up();
    UNROLL for (int r = 0; r < ROWS; r++) {
        int m = m0 + r;
        if (lane != r % LX || m >= M || n >= N) continue;
#if ACT && !GROUPED
        vec4 v = finish_sums(total[r], m, n);
#elif GROUPED
        vec4 v = finish(total[r], m, n);
#else
        vec4 v = finish(total[r] * scale4(n, 0), m, n);
#endif
        store4(v, offset_o + m * ldo + n, m, n);
    }
}
