/* Errors and the choice of kernels, for the other files of the library. */
#ifndef PIPPIN_LIBRARY_H
#define PIPPIN_LIBRARY_H

#include "kernels.h"

namespace pippin {

/* Keep the message for pippin_error of this thread; returns `status`. */
__attribute__((format(printf, 2, 3))) int fail(int status, const char *format, ...);

/* Add nanoseconds to what pippin_profile reports: linear layers, attention, everything else, waiting. */
void profile_add(const int64_t nanoseconds[4]);

} // namespace pippin

#endif
