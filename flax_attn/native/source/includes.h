// What the kernels include, before a level of instructions is chosen: templates of the standard library must not be
// compiled for a processor that may be missing.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "parallel.h"
