"""Native engines, one a task: graphs or programs in the native kernels behind the protocol of sessions."""
