// Reads of a file past the page cache, many at a time: Linux asynchronous I/O (which containers allow, unlike io_uring) with O_DIRECT, where a read costs a
// fifth of the processor time of a page fault. Where the file system has no direct I/O, plain reads.
#pragma once
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "isa/arrays.h"

namespace zoo {

class DirectReads {
  public:
    explicit DirectReads(const std::string &path) : path_(path) {
        file_ = open(path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
        direct_ = file_ >= 0;
        if (!direct_) file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (file_ < 0) fail(errno);
    }
    DirectReads(const DirectReads &) = delete;
    ~DirectReads() {
        if (context_ && process_ == getpid()) syscall(SYS_io_destroy, context_);
        close(file_);
    }

    // Queues a read of `bytes` at `offset`; they are at `to` after `wait`, which raises the errors of all reads.
    void read(int64_t offset, int64_t bytes, uint8_t *to) {
        start();
        if (!context_) return read_now(offset, bytes, to);
        const int64_t first = offset & -kPage, length = round_up(offset + bytes - first, kPage);
        if (length > request_bytes_) {
            wait();
            memory_.reserve(kDepth * length + kPage), request_bytes_ = length;
        }
        while (free_.empty()) submit(), complete(1);
        const int64_t slot = free_.back();
        free_.pop_back();
        requests_[static_cast<size_t>(slot)] = {to, offset - first, bytes, length, offset};
        iocb &control = controls_[static_cast<size_t>(slot)];
        control = {};
        control.aio_data = static_cast<uint64_t>(slot), control.aio_lio_opcode = IOCB_CMD_PREAD, control.aio_fildes = static_cast<uint32_t>(file_);
        control.aio_buf = reinterpret_cast<uint64_t>(buffer(slot)), control.aio_nbytes = static_cast<uint64_t>(length), control.aio_offset = first;
        queued_.push_back(&control);
        if (queued_.size() == kGroup) submit();
    }

    void wait() {
        submit();
        while (context_ && free_.size() < kDepth) complete(1);
        if (const int error = std::exchange(error_, 0)) fail(error);
    }

  private:
    static constexpr int64_t kPage = 4096;
    static constexpr size_t kDepth = 256, kGroup = 32;  // requests that are under way, and that are submitted together
    struct Request {
        uint8_t *to;
        int64_t shift, bytes, length, offset;
    };

    uint8_t *buffer(int64_t slot) const {
        return reinterpret_cast<uint8_t *>(round_up(reinterpret_cast<int64_t>(memory_.data()), kPage)) + slot * request_bytes_;
    }

    // A forked process has a context of its own: that of its parent is not there.
    void start() {
        if (!direct_ || process_ == getpid()) return;
        process_ = getpid(), context_ = 0, queued_.clear(), free_.clear();
        if (syscall(SYS_io_setup, kDepth, &context_) < 0) context_ = 0, direct_ = false;
        if (!context_) {
            const int plain = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
            if (plain < 0) fail(errno);
            close(file_), file_ = plain;
            return;
        }
        requests_.resize(kDepth), controls_.resize(kDepth);
        for (size_t i = kDepth; i-- > 0;) free_.push_back(static_cast<int64_t>(i));
    }

    void submit() {
        size_t done = 0;
        while (done < queued_.size()) {
            const long taken = syscall(SYS_io_submit, context_, queued_.size() - done, queued_.data() + done);
            if (taken < 0 && errno == EAGAIN && free_.size() + queued_.size() - done < kDepth)
                complete(1);
            else if (taken < 0 && errno != EINTR) {
                error_ = errno;
                for (; done < queued_.size(); ++done) free_.push_back(static_cast<int64_t>(queued_[done]->aio_data));
            } else if (taken > 0)
                done += static_cast<size_t>(taken);
        }
        queued_.clear();
    }

    void complete(long least) {
        io_event events[kGroup];
        const long count = syscall(SYS_io_getevents, context_, least, kGroup, events, nullptr);
        if (count < 0 && errno != EINTR) fail(errno);
        for (long i = 0; i < count; ++i) {
            const Request &request = requests_[events[i].data];
            const int64_t got = events[i].res;
            if (got >= request.shift + request.bytes)
                std::memcpy(request.to, buffer(static_cast<int64_t>(events[i].data)) + request.shift, static_cast<size_t>(request.bytes));
            else
                error_ = got < 0 ? static_cast<int>(-got) : EIO;
            free_.push_back(static_cast<int64_t>(events[i].data));
        }
    }

    void read_now(int64_t offset, int64_t bytes, uint8_t *to) {
        for (int64_t done = 0; done < bytes && !error_;) {
            const ssize_t got = pread(file_, to + done, static_cast<size_t>(bytes - done), offset + done);
            if (got > 0)
                done += got;
            else if (!got || errno != EINTR)
                error_ = got ? errno : EIO;
        }
    }

    [[noreturn]] void fail(int error) const { throw std::runtime_error("cannot read " + path_ + " (" + std::strerror(error) + ")"); }

    std::string path_;
    int file_;
    bool direct_;
    aio_context_t context_ = 0;
    pid_t process_ = 0;
    int error_ = 0;  // of a read since the last `wait`
    int64_t request_bytes_ = 0;
    Buffer<uint8_t> memory_;
    std::vector<Request> requests_;
    std::vector<iocb> controls_;
    std::vector<iocb *> queued_;
    std::vector<int64_t> free_;
};

}  // namespace zoo
