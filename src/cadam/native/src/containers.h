/* Comparison of Python dicts and lists with the objects that they contained before, see containers.c. */
#ifndef CONTAINERS_H
#define CONTAINERS_H

#include "structs.h"

int cadam_are_containers_unchanged(const python_functions *python, const tracked_container *containers, int64_t count);

#endif
