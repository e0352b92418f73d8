#version 450
#extension GL_GOOGLE_include_directive : enable
// Computes the results at one index by statements that come in as a macro. map.glslh says what the
// statements can name.
//
// Macros:
//   BODY          statements that set r (and r1, ... if there are several results)
#include "elementwise/map.glslh"

#ifndef BODY
#define BODY r = X(i0) + 1.0;
#endif

void main() {
    uint id = MAP_ID;
    if (MAP_HAS_WORK(id)) {
        COORDINATES
        BODY
        STORE
    }
}
