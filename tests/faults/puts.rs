//! Calls of one kind, whose rate can be compared.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tonic_rdma::Channel;
use tonic_rdma_tests::channel::AnyChannel;
use tonic_rdma_tests::harness::client_of;
use tonic_rdma_tests::service::script::payload;

/// Length of a request, in bytes.
const MESSAGE: usize = 256 * 1024;

/// Makes calls in a loop until dropped.
pub struct Puts {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Puts {
    /// Starts `in_flight` calls over each channel.
    pub fn start(channels: &[Channel], in_flight: usize) -> Self {
        let mut puts = Self {
            stop: Arc::default(),
            done: Arc::default(),
            failed: Arc::default(),
            tasks: Vec::new(),
        };
        for channel in channels.iter().flat_map(|channel| vec![channel; in_flight]) {
            let mut calls = client_of(AnyChannel::Rdma(channel.clone()));
            let (stop, done, failed) = (puts.stop.clone(), puts.done.clone(), puts.failed.clone());
            puts.tasks.push(tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let ended = calls.unary(payload(7, MESSAGE)).await;
                    let count = if ended.is_ok() { &done } else { &failed };
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }));
        }
        puts
    }

    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    pub async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
    }
}
