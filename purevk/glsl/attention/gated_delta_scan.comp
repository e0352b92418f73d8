#version 450
#extension GL_GOOGLE_include_directive : enable
// The gated delta rule chunk by chunk, with what gated_delta_chunks.comp has made of each chunk. A
// workgroup keeps SLICE rows of the state of a head. For each chunk, by matmuls of tiles:
//   d = U - W S^T,  out = G * q S^T + P d,  S = G[last] * S + d^T (D[last] * k)
// An invocation has 4 columns (rows of the state) of ROWS deltas, ROWS outputs, and 4 keys of the
// state or a multiple. While a tile is multiplied, the next one is read. Each tile has sums of its
// own, which are added up: that rounds less.
//
// Buffers: q, k, state, out, after as in gated_delta.comp; solved, weights, factors as in
//   gated_delta_chunks.comp. All but `factors` are read and written as whole vec4s.
// Macros:
//   K      keys of a head, a multiple of 16
//   CHUNK  tokens of a chunk
//   SLICE  rows of the state of a workgroup, a multiple of 4
//   LOCAL  invocations of the workgroup: divides 8 * CHUNK and CHUNK * SLICE / 4
// Grid: (ceil(V / SLICE), heads, 1)
#include "core/common.glslh"

#ifndef K
#define K 16
#endif
#ifndef CHUNK
#define CHUNK 32
#endif
#ifndef SLICE
#define SLICE 16
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
PARAM(11, state_offset)
PARAM(12, out_offset)
PARAM(13, after_offset)
READONLY_BUFFER(0, q, vec4)
READONLY_BUFFER(1, k, vec4)
READONLY_BUFFER(2, solved, vec4)
READONLY_BUFFER(3, weights, vec4)
READONLY_BUFFER(4, factors, float)
READONLY_BUFFER(5, state, vec4)
WRITEONLY_BUFFER(6, out, vec4)
WRITEONLY_BUFFER(7, after, vec4)

#define LANES (SLICE / 4)
#define GROUPS (LOCAL / LANES)
#define ROWS (CHUNK / GROUPS)
#define QUADS (K / 4)
#define PARTS ((QUADS + GROUPS - 1) / GROUPS)  // quads of keys of an invocation
#define ROW_TILE (8 * CHUNK)                   // 16 columns of W, and below them of q
#define KEY_TILE (2 * CHUNK + 2 * K)           // 8 columns of P, then 8 rows of k
#define QUAD(part) min(group + (part) * GROUPS, QUADS - 1)
#define IS_OWN(part) (group + (part) * GROUPS < QUADS)
#define AHEAD ((max(ROW_TILE, KEY_TILE) + LOCAL - 1) / LOCAL)
#define SLOT4(row, quad) ((row) * 4 + ((quad) + (row) / 2) % 4)  // rows are in other banks than the next
#define SLOT2(row, quad) ((row) * 2 + ((quad) + (row) / 4) % 2)
LOOPS(loop(ceil(steps, CHUNK), loop(K / 16) + loop(CHUNK / 8)))

shared vec4 states[K * LANES];
shared vec4 deltas[CHUNK * LANES];
shared vec4 tile[max(ROW_TILE, KEY_TILE)];
vec4 ahead[AHEAD];
float scale[AHEAD];
int id, head, key_head, lane, group;
vec4 own[PARTS * 4];  // of the state: 4 columns of each of its keys

void read_rows(int chunk, int quad) {
    int from = (chunk * heads + head) * CHUNK * (values / 4 + QUADS) + values / 4;
    UNROLL for (int n = 0; n < ROW_TILE / LOCAL; n++) {
        int e = id + n * LOCAL, row = e / 4, at = quad + e % 4;
        if (row < CHUNK) {
            ahead[n] = buf_solved[from + row * (values / 4 + QUADS) + at];
        } else {
            int t = min(chunk * CHUNK + row - CHUNK, steps - 1);
            ahead[n] = buf_q[(q_offset + t * q_step + key_head * q_head) / 4 + at];
        }
    }
}

void write_rows() {
    UNROLL for (int n = 0; n < ROW_TILE / LOCAL; n++) {
        int e = id + n * LOCAL;
        tile[SLOT4(e / 4, e % 4)] = ahead[n];
    }
}

void read_keys(int chunk, int first) {
    int from = (chunk * heads + head) * CHUNK;
    UNROLL for (int n = 0; n < AHEAD; n++) {
        int e = id + n * LOCAL, key = e - 2 * CHUNK;
        if (key < 0) {
            ahead[n] = buf_weights[(from + e / 2) * (CHUNK / 4) + first / 4 + e % 2];
            scale[n] = 1.0;
        } else if (key < 2 * K) {
            int i = first + key / QUADS, t = min(chunk * CHUNK + i, steps - 1);
            ahead[n] = buf_k[(k_offset + t * k_step + key_head * k_head) / 4 + key % QUADS];
            scale[n] = buf_factors[from * 2 + CHUNK + i];
        }
    }
}

void write_keys() {
    UNROLL for (int n = 0; n < AHEAD; n++) {
        int e = id + n * LOCAL;
        if (e < KEY_TILE) tile[e < 2 * CHUNK ? SLOT2(e / 2, e % 2) : e] = ahead[n] * scale[n];
    }
}

void share_state() {
    UNROLL for (int n = 0; n < PARTS * 4; n++) {
        if (IS_OWN(n / 4)) states[(QUAD(n / 4) * 4 + n % 4) * LANES + lane] = own[n];
    }
}

void main() {
    id = int(gl_LocalInvocationIndex);
    head = int(WORKGROUP_ID.y);
    key_head = head / divisor % key_heads;
    lane = id % LANES;
    group = id / LANES;
    int chunks = (steps + CHUNK - 1) / CHUNK;
    int column = int(WORKGROUP_ID.x) * SLICE + lane * 4, near = min(column, values - 4);
    UNROLL for (int r = 0; r < PARTS; r++) {
        UNROLL for (int m = 0; m < 4; m++) {
            vec4 row = buf_state[state_offset / 4 + (head * values + near + m) * QUADS + QUAD(r)];
            UNROLL for (int i = 0; i < 4; i++) own[r * 4 + i][m] = row[i];
        }
    }
    share_state();
    if (chunks > 0) read_rows(0, 0);
    for (int chunk = 0; chunk < chunks; chunk++) {
        int from = (chunk * heads + head) * CHUNK;
        vec4 sums[2 * ROWS], u[ROWS];
        UNROLL for (int n = 0; n < ROWS; n++) {
            sums[n] = sums[ROWS + n] = vec4(0.0);
            u[n] = buf_solved[(from + group * ROWS + n) * (values / 4 + QUADS) + near / 4];
        }
        for (int quad = 0; quad < QUADS; quad += 4) {
            barrier();
            write_rows();
            barrier();
            if (quad + 4 < QUADS) {
                read_rows(chunk, quad + 4);
            } else {
                read_keys(chunk, 0);
            }
            vec4 sum[2 * ROWS];
            UNROLL for (int n = 0; n < 2 * ROWS; n++) sum[n] = vec4(0.0);
            UNROLL for (int part = 0; part < 4; part++) {
                vec4 s[4];
                UNROLL for (int m = 0; m < 4; m++) s[m] = states[((quad + part) * 4 + m) * LANES + lane];
                UNROLL for (int n = 0; n < 2 * ROWS; n++) {
                    int row = n < ROWS ? group * ROWS + n : CHUNK + group * ROWS + n - ROWS;
                    vec4 a = tile[SLOT4(row, part)];
                    UNROLL for (int m = 0; m < 4; m++) sum[n] += a[m] * s[m];
                }
            }
            UNROLL for (int n = 0; n < 2 * ROWS; n++) sums[n] += sum[n];
        }
        UNROLL for (int n = 0; n < ROWS; n++) {
            deltas[(group * ROWS + n) * LANES + lane] = u[n] - sums[n];
            sums[ROWS + n] *= buf_factors[from * 2 + group * ROWS + n];
        }
        float decay = buf_factors[from * 2 + CHUNK - 1];
        UNROLL for (int i = 0; i < PARTS * 4; i++) own[i] *= decay;
        for (int first = 0; first < CHUNK; first += 8) {
            barrier();
            write_keys();
            barrier();
            if (first + 8 < CHUNK) {
                read_keys(chunk, first + 8);
            } else {
                read_rows(min(chunk + 1, chunks - 1), 0);
            }
            vec4 sum[ROWS];
            UNROLL for (int n = 0; n < ROWS; n++) sum[n] = vec4(0.0);
            UNROLL for (int part = 0; part < 2; part++) {
                vec4 d[4];
                UNROLL for (int m = 0; m < 4; m++) d[m] = deltas[(first + part * 4 + m) * LANES + lane];
                // What is right of the diagonal of P is not read: the deltas may be NaN there.
                int at = first + part * 4 - group * ROWS;
                if (at < ROWS) {
                    UNROLL for (int n = 0; n < ROWS; n++) {
                        vec4 p = tile[SLOT2(group * ROWS + n, part)];
                        UNROLL for (int m = 0; m < 4; m++) sum[n] += at + m <= n ? p[m] * d[m] : vec4(0.0);
                    }
                }
                UNROLL for (int r = 0; r < PARTS; r++) {
                    UNROLL for (int m = 0; m < 4; m++) {
                        vec4 key = tile[2 * CHUNK + (part * 4 + m) * QUADS + QUAD(r)];
                        UNROLL for (int i = 0; i < 4; i++) own[r * 4 + i] += key[i] * d[m];
                    }
                }
            }
            UNROLL for (int n = 0; n < ROWS; n++) sums[ROWS + n] += sum[n];
        }
        UNROLL for (int n = 0; n < ROWS; n++) {
            int t = chunk * CHUNK + group * ROWS + n;
            if (t < steps && column < values) buf_out[(out_offset + (t * heads + head) * values + column) / 4] = sums[ROWS + n];
        }
        share_state();
    }
    UNROLL for (int r = 0; r < PARTS; r++) {
        UNROLL for (int m = 0; m < 4; m++) {
            if (IS_OWN(r) && column < values) {
                buf_after[after_offset / 4 + (head * values + column + m) * QUADS + QUAD(r)] =
                    vec4(own[r * 4][m], own[r * 4 + 1][m], own[r * 4 + 2][m], own[r * 4 + 3][m]);
            }
        }
    }
}
