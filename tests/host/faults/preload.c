/* Faults below DeepSpeed and Python, for tests: a library that LD_PRELOAD puts before libaio and libc.
   FAULT=eio    every asynchronous write is dropped and completes with -EIO, as on a dying drive
   FAULT=setup  io_setup fails with EAGAIN, as when fs.aio-max-nr is used up
   FAULT=fsync  fsync of a checkpoint fails with EIO, where the kernel reports a failed write-back */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <libaio.h>

static int wanted(const char *fault)
{
    const char *set = getenv("FAULT");
    return set && strcmp(set, fault) == 0;
}

int io_setup(int depth, io_context_t *context)
{
    int (*real)(int, io_context_t *) = dlsym(RTLD_NEXT, "io_setup");
    return wanted("setup") ? -EAGAIN : real(depth, context);
}

int io_submit(io_context_t context, long count, struct iocb *requests[])
{
    int (*real)(io_context_t, long, struct iocb **) = dlsym(RTLD_NEXT, "io_submit");
    if (wanted("eio"))
        for (long i = 0; i < count; i++)
            requests[i]->u.c.nbytes = 0;
    return real(context, count, requests);
}

static int fail_all(int got, struct io_event *events)
{
    if (wanted("eio"))
        for (int i = 0; i < got; i++)
            events[i].res = (unsigned long)-EIO;
    return got;
}

int io_getevents(io_context_t context, long least, long most, struct io_event *events, struct timespec *wait)
{
    int (*real)(io_context_t, long, long, struct io_event *, struct timespec *) = dlsym(RTLD_NEXT, "io_getevents");
    return fail_all(real(context, least, most, events, wait), events);
}

int io_pgetevents(io_context_t context, long least, long most, struct io_event *events, struct timespec *wait,
                  sigset_t *mask)
{
    int (*real)(io_context_t, long, long, struct io_event *, struct timespec *, sigset_t *) =
        dlsym(RTLD_NEXT, "io_pgetevents");
    return fail_all(real(context, least, most, events, wait, mask), events);
}

int fsync(int descriptor)
{
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    if (wanted("fsync") && strstr(path, ".pt")) {
        errno = EIO;
        return -1;
    }
    return real(descriptor);
}
