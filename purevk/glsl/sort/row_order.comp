#version 450
#extension GL_GOOGLE_include_directive : enable
// The indices of the rows of X in ascending order, NaN last: row i0 counts the rows before it.
//
// T_X  the type in which elements are compared
// IS_LESS(a, b)  whether a comes before b
#include "elementwise/map.glslh"
#ifndef T_X
#define T_X float
#endif
#ifndef IS_LESS
#define IS_LESS(a, b) (a < b || (pv_isnan(b) && !pv_isnan(a)))
#endif
#ifdef BARE
#undef X
#define X(i, c) buf_x[i]
#define R_PUT(i, v) buf_r[i] = v
#else
LOOPS(loop(x_size_0, loop(x_size_1)))
#endif

MAP_BEGIN
int before = 0;
for (int j = 0; j < x_size_0; j++) {
    int order = 0;
    for (int c = 0; c < x_size_1 && order == 0; c++) {
        T_X a = X(j, c), b = X(i0, c);
        order = IS_LESS(a, b) ? -1 : IS_LESS(b, a) ? 1 : 0;
    }
    if (order < 0 || (order == 0 && j < i0)) before++;
}
R_PUT(before, i0);
MAP_END
