//! A zero-copy RDMA transport for tonic: Endpoint, Channel and Server that fall back to TCP.
