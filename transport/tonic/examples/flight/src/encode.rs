//! Encodes record batches into pool memory.

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_flight::error::FlightError;
use arrow_flight::{FlightData, FlightDescriptor};
use arrow_ipc::writer::{IpcWriteOptions, StreamEncoder};
use arrow_schema::Schema;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures_util::{Stream, StreamExt};
use tonic_rdma::{Pool, PoolError};

/// The marker in front of each message of an Arrow stream. The length of the message's header
/// follows the marker.
const CONTINUATION: u32 = u32::MAX;

/// Encodes record batches as messages whose bodies are sent from pool memory.
///
/// arrow-flight's own encoder joins a batch's buffers on the heap, and an RDMA transport has to
/// copy the joined buffers once more. This encoder joins the buffers in pool memory. Over RDMA this
/// copy is the only copy between two processes. A body that is longer than the pool's memory for
/// sending lies on the heap.
///
/// A batch becomes one message, however long it is, and each new dictionary becomes one message.
/// Raise the receiver's `max_decoding_message_size`, which is 4 MiB by default, or slice long
/// batches before you encode them.
pub struct BatchEncoder {
    encoder: StreamEncoder,
    pool: Pool,
    descriptor: Option<FlightDescriptor>,
}

impl BatchEncoder {
    /// Creates an encoder for batches of this schema. `pool` is the pool of the connection:
    /// `Channel::pool()` at a client, `tonic_rdma::pool(&request)` at a server.
    ///
    /// # Errors
    /// Arrow cannot encode the schema.
    pub fn new(pool: Pool, schema: &Schema, options: IpcWriteOptions) -> Result<Self, FlightError> {
        let encoder = StreamEncoder::try_new_with_options(schema, options)?;
        Ok(BatchEncoder { encoder, pool, descriptor: None })
    }

    /// Adds this descriptor, which names the data that is put, to the first message.
    pub fn with_descriptor(self, descriptor: FlightDescriptor) -> Self {
        BatchEncoder { descriptor: Some(descriptor), ..self }
    }

    /// Returns the messages of one batch. For the first batch, the schema's message comes first.
    ///
    /// Waits for pool memory.
    ///
    /// # Errors
    /// Arrow cannot encode the batch, or the system has no memory.
    ///
    /// # Cancel safety
    /// Not cancel safe: a dictionary or schema whose message is lost is not encoded again.
    pub async fn encode(&mut self, batch: &RecordBatch) -> Result<Vec<FlightData>, FlightError> {
        let encoded = self.encoder.encode(batch)?;
        messages(&self.pool, &mut self.descriptor, encoded).await
    }

    /// Returns the schema's message, if no batch was encoded.
    ///
    /// # Errors
    /// The errors of [`encode`](Self::encode).
    pub async fn finish(self) -> Result<Vec<FlightData>, FlightError> {
        let BatchEncoder { encoder, pool, mut descriptor } = self;
        messages(&pool, &mut descriptor, encoder.finish()?).await
    }
}

/// Encodes a stream of batches into pool memory, like arrow-flight's `FlightDataEncoder`.
///
/// # Errors
/// The errors of `batches` and of [`BatchEncoder`]. The stream ends after the first error.
pub fn batches<S>(
    mut encoder: BatchEncoder,
    batches: S,
) -> impl Stream<Item = Result<FlightData, FlightError>> + Send + 'static
where
    S: Stream<Item = Result<RecordBatch, FlightError>> + Send + 'static,
{
    async_stream::try_stream! {
        let mut batches = std::pin::pin!(batches);
        while let Some(batch) = batches.next().await {
            for message in encoder.encode(&batch?).await? {
                yield message;
            }
        }
        for message in encoder.finish().await? {
            yield message;
        }
    }
}

/// Cuts an encoded Arrow stream into messages.
async fn messages(
    pool: &Pool,
    descriptor: &mut Option<FlightDescriptor>,
    encoded: Vec<Buffer>,
) -> Result<Vec<FlightData>, FlightError> {
    let mut stream = Joined::new(encoded);
    let mut messages = Vec::new();
    while stream.remaining() > 0 {
        let header_len = match stream.try_get_u32_le() {
            Ok(CONTINUATION) => stream.try_get_u32_le(),
            other => other, // the format before Arrow 0.15
        };
        let header_len = header_len.map_err(|_| malformed("it ends in a prefix"))? as usize;
        if header_len == 0 {
            break; // the end of the stream
        }
        if header_len > stream.remaining() {
            return Err(malformed("it ends in a header"));
        }
        let header = stream.copy_to_bytes(header_len);
        let body_len = arrow_ipc::root_as_message(&header)
            .map_err(|_| malformed("a header is no message"))?
            .bodyLength();
        let body_len = usize::try_from(body_len)
            .ok()
            .filter(|len| *len <= stream.remaining())
            .ok_or_else(|| malformed("it ends in a body"))?;
        messages.push(FlightData {
            flight_descriptor: descriptor.take(),
            data_header: header,
            data_body: body(pool, &mut stream, body_len).await?,
            ..FlightData::default()
        });
    }
    Ok(messages)
}

/// Returns the next `len` bytes, in pool memory if they fit.
async fn body(pool: &Pool, stream: &mut Joined, len: usize) -> Result<Bytes, FlightError> {
    if len == 0 {
        return Ok(Bytes::new());
    }
    match pool.alloc(len).await {
        Ok(mut buf) => {
            buf.put(stream.take(len));
            Ok(buf.freeze())
        }
        Err(PoolError::TooLarge { .. }) => {
            let mut buf = BytesMut::with_capacity(len);
            buf.put(stream.take(len));
            Ok(buf.freeze())
        }
        Err(e) => Err(FlightError::ExternalError(Box::new(e))),
    }
}

fn malformed(what: &str) -> FlightError {
    FlightError::ProtocolError(format!("arrow's encoder made a stream that cannot be read: {what}"))
}

/// Several buffers in sequence.
struct Joined {
    /// The buffers that are left, in reverse order.
    buffers: Vec<Buffer>,
    remaining: usize,
}

impl Joined {
    fn new(mut buffers: Vec<Buffer>) -> Self {
        let remaining = buffers.iter().map(Buffer::len).sum();
        buffers.retain(|buffer| !buffer.is_empty());
        buffers.reverse();
        Joined { buffers, remaining }
    }
}

impl Buf for Joined {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        self.buffers.last().map_or(&[], Buffer::as_slice)
    }

    fn advance(&mut self, mut n: usize) {
        assert!(n <= self.remaining, "{n} bytes of {}", self.remaining);
        self.remaining -= n;
        while let Some(first) = self.buffers.last_mut() {
            if n < first.len() {
                first.advance(n);
                return;
            }
            n -= first.len();
            self.buffers.pop();
        }
    }
}
