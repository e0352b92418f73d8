#version 450
#extension GL_GOOGLE_include_directive : enable
// What the gated delta rule (gated_delta.comp) computes of a chunk of tokens without the state
// before it, for all chunks and heads at a time. D[i][j] is the product of the decays of the tokens
// after j up to i, G[i] that of all up to i, S the state before the chunk. The deltas d and the
// outputs of the chunk, and the state after it, are
//   (I + A) d = beta * (v - G * k S^T),  A[i][j] = beta[i] * D[i][j] * (k[i] . k[j]) for j < i,
//   out = G * q S^T + P d,               P[i][j] = D[i][j] * (q[i] . k[j]) for j <= i,
//   S' = G[last] * S + d^T (D[last] * k)
// Here: U and W with d = U - W S^T, by forward substitution, P, G and D[last].
// gated_delta_scan.comp does the rest. D is a product, and no quotient or logarithm: decays may be 0.
//
// Buffers: q, k, v, decay, beta as in gated_delta.comp, q and k in whole vec4s; for each chunk and
//   head: solved [CHUNK, V + K], U and W beside each other; weights [CHUNK, CHUNK], P; factors
//   [2, CHUNK], G and D[last]. Tokens after the last are all 0, with a decay of 1.
// Macros:
//   K      keys of a head, a multiple of 16
//   CHUNK  tokens of a chunk, a multiple of BLOCK
//   BLOCK  tokens that are solved in registers, a multiple of 4
//   LOCAL  invocations of the workgroup: a multiple of CHUNK / 4, at most CHUNK * CHUNK / 4
// Grid: (chunks, heads, 1)
#include "core/common.glslh"

#ifndef K
#define K 16
#endif
#ifndef CHUNK
#define CHUNK 32
#endif
#ifndef BLOCK
#define BLOCK 16
#endif
#ifndef LOCAL
#define LOCAL 128
#endif

layout(local_size_x = LOCAL) in;
PARAM(0, steps)
PARAM(1, values)
PARAM(2, heads)
PARAM(3, divisor)  // head h reads queries and keys of head h / divisor % key_heads
PARAM(4, key_heads)
PARAM(5, q_offset)
PARAM(6, q_step)
PARAM(7, q_head)
PARAM(8, k_offset)
PARAM(9, k_step)
PARAM(10, k_head)
PARAM(11, v_offset)
PARAM(12, v_step)
PARAM(13, v_head)
PARAM(14, decay_offset)
PARAM(15, beta_offset)
READONLY_BUFFER(0, q, vec4)
READONLY_BUFFER(1, k, vec4)
BUFFER_VIEW(1, k, k1, float)
READONLY_BUFFER(2, v, float)
READONLY_BUFFER(3, decay, float)
READONLY_BUFFER(4, beta, float)
BUFFER(5, solved, float)
WRITEONLY_BUFFER(6, weights, vec4)
WRITEONLY_BUFFER(7, factors, float)

#define LANES (CHUNK / 4)      // invocations of a row of A and P, of 4 columns each
#define ROWS (CHUNK * LANES / LOCAL)
#define SLOT(row, quad) ((row) * 4 + (row) / 4 + (quad))  // no two rows of 4 in one bank
LOOPS(loop(CHUNK) + loop(CHUNK) + loop(K / 16))
LOOPS(loop(ceil(values + K, LOCAL), loop(CHUNK / BLOCK, loop(CHUNK / 4))))
UNROLLED_CODE(BLOCK * BLOCK / 2 + BLOCK * 4 + CHUNK * CHUNK * 32 / LOCAL)

shared vec4 tile[2 * CHUNK * 4 + CHUNK / 2];  // 16 columns of k, and below them of q
shared vec4 matrix[CHUNK * LANES];            // A; what is right of its diagonal is not read
shared float decays[CHUNK], betas[CHUNK], products[CHUNK];

void main() {
    int id = int(gl_LocalInvocationIndex), head = int(WORKGROUP_ID.y);
    int first = int(WORKGROUP_ID.x) * CHUNK, chunk = int(WORKGROUP_ID.x) * heads + head;
    int key_head = head / divisor % key_heads, last = steps - 1;
    for (int i = id; i < CHUNK; i += LOCAL) {
        bool is_token = first + i < steps;
        int at = min(first + i, last) * heads + head;
        decays[i] = is_token ? buf_decay[decay_offset + at] : 1.0;
        betas[i] = is_token ? buf_beta[beta_offset + at] : 0.0;
    }
    int lane = id % LANES, row = id / LANES * ROWS;
    vec4 of_keys[ROWS], of_queries[ROWS];
    UNROLL for (int n = 0; n < ROWS; n++) of_keys[n] = of_queries[n] = vec4(0.0);
    for (int quad = 0; quad < K / 4; quad += 4) {
        barrier();
        UNROLL for (int n = 0; n < 8 * CHUNK / LOCAL; n++) {
            int e = id + n * LOCAL, i = e / 4, t = first + i % CHUNK;
            vec4 x = vec4(0.0);
            if (t < steps) {
                x = i < CHUNK ? buf_k[(k_offset + t * k_step + key_head * k_head) / 4 + quad + e % 4]
                              : buf_q[(q_offset + t * q_step + key_head * q_head) / 4 + quad + e % 4];
            }
            tile[SLOT(i, e % 4)] = x;
        }
        barrier();
        vec4 sums[2 * ROWS];
        UNROLL for (int n = 0; n < 2 * ROWS; n++) sums[n] = vec4(0.0);
        UNROLL for (int part = 0; part < 4; part++) {
            vec4 column[4];
            UNROLL for (int m = 0; m < 4; m++) column[m] = tile[SLOT(lane * 4 + m, part)];
            UNROLL for (int n = 0; n < ROWS; n++) {
                vec4 key = tile[SLOT(row + n, part)], query = tile[SLOT(CHUNK + row + n, part)];
                UNROLL for (int i = 0; i < 4; i++) {
                    vec4 other = vec4(column[0][i], column[1][i], column[2][i], column[3][i]);
                    sums[n] += key[i] * other;
                    sums[ROWS + n] += query[i] * other;
                }
            }
        }
        UNROLL for (int n = 0; n < ROWS; n++) {
            of_keys[n] += sums[n];
            of_queries[n] += sums[ROWS + n];
        }
    }
    ivec4 columns = ivec4(0, 1, 2, 3) + lane * 4;
    vec4 product = vec4(0.0);  // D of a row: 0 right of the diagonal
    for (int i = lane * 4; i < row; i++) product = mix(product * decays[i], vec4(1.0), equal(columns, ivec4(i)));
    UNROLL for (int n = 0; n < ROWS; n++) {
        int i = row + n;
        product = mix(product * decays[i], vec4(1.0), equal(columns, ivec4(i)));
        matrix[i * LANES + lane] = betas[i] * product * of_keys[n];
        buf_weights[(chunk * CHUNK + i) * LANES + lane] =
            mix(vec4(0.0), product * of_queries[n], lessThanEqual(columns, ivec4(i)));
        if (lane == 0) buf_factors[chunk * 2 * CHUNK + i] = products[i] = decays[0] * product.x;
    }
    UNROLL for (int m = 0; m < 4; m++) {
        if (row + ROWS == CHUNK) buf_factors[(chunk * 2 + 1) * CHUNK + lane * 4 + m] = product[m];
    }
    barrier();
    for (int column = id; column < values + K; column += LOCAL) {
        bool is_key = column >= values;
        int at = is_key ? k_offset + key_head * k_head + column - values : v_offset + head * v_head + column;
        int to = chunk * CHUNK * (values + K) + column;
        for (int block = 0; block < CHUNK; block += BLOCK) {
            float x[BLOCK];
            if (is_key) {
                UNROLL for (int i = 0; i < BLOCK; i++) {
                    x[i] = betas[block + i] * products[block + i] * buf_k1[at + min(first + block + i, last) * k_step];
                }
            } else {
                UNROLL for (int i = 0; i < BLOCK; i++) {
                    x[i] = betas[block + i] * buf_v[at + min(first + block + i, last) * v_step];
                }
            }
            for (int j = 0; j < block; j += 4) {
                vec4 before;
                UNROLL for (int m = 0; m < 4; m++) before[m] = buf_solved[to + (j + m) * (values + K)];
                UNROLL for (int i = 0; i < BLOCK; i++) {
                    vec4 a = matrix[(block + i) * LANES + j / 4];
                    UNROLL for (int m = 0; m < 4; m++) x[i] -= a[m] * before[m];
                }
            }
            UNROLL for (int i = 0; i < BLOCK; i++) {
                UNROLL for (int j = 0; j < BLOCK; j++) {
                    if (j < i) {
                        vec4 a = matrix[(block + i) * LANES + (block + j) / 4];
                        x[i] -= a[j % 4] * x[j];
                    }
                }
                buf_solved[to + (block + i) * (values + K)] = x[i];
            }
        }
    }
}
