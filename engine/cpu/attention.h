/* The scratch of attention. Private to the kernels. */
#ifndef TANDEM_ATTENTION_H
#define TANDEM_ATTENTION_H

#include "kernels.h"

int64_t td_attend_bytes(const td_model *model);

#endif
