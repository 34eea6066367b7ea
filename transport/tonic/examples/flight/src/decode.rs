//! Record batches out of what arrives.

use std::panic::AssertUnwindSafe;

use arrow_array::RecordBatch;
use arrow_flight::FlightData;
use arrow_flight::decode::{DecodedFlightData, DecodedPayload, FlightDataDecoder};
use arrow_flight::error::FlightError;
use bytes::Bytes;
use futures_util::{Stream, StreamExt, TryStreamExt};
use tonic::Status;

/// Decodes the record batches of a `DoGet`, `DoPut` or `DoExchange`.
///
/// The columns lie where the body of their message landed: the body is not copied, as long as it
/// begins at a multiple of 64 bytes, which tonic-rdma sees to. (A body that is compressed is
/// decompressed into the heap; a buffer that its writer did not align is copied by arrow.) The
/// landing memory returns to its pool when the last array of the batch is dropped.
///
/// The header of each message, some hundred bytes, is copied first: arrow checks it once and then
/// relies on it, and the peer may still write to what landed. It may write to the body too. Arrow
/// also relies on the offsets of strings and lists after it has checked them, so let a peer that is
/// not trusted fill no columns that are read in place: see docs/flight.md.
///
/// # Errors
/// Each error of the call, and what arrow finds wrong in a message, ends the stream. Where arrow
/// panics at a message, which it does at some that are malformed, the stream ends with a
/// [`FlightError::DecodeError`] as well, unless the program aborts at panics.
pub fn batches<S>(messages: S) -> impl Stream<Item = Result<RecordBatch, FlightError>> + Send
where
    S: Stream<Item = Result<FlightData, Status>> + Send + 'static,
{
    self::messages(messages).try_filter_map(async |message| match message.payload {
        DecodedPayload::RecordBatch(batch) => Ok(Some(batch)),
        DecodedPayload::Schema(_) | DecodedPayload::None => Ok(None),
    })
}

/// The same, with each message that a batch or the schema came in, and those that bring metadata
/// only.
///
/// # Errors
/// As [`batches`].
pub fn messages<S>(messages: S) -> impl Stream<Item = Result<DecodedFlightData, FlightError>> + Send
where
    S: Stream<Item = Result<FlightData, Status>> + Send + 'static,
{
    let messages = messages.map(|message| {
        let mut message = message.map_err(FlightError::from)?;
        message.data_header = Bytes::copy_from_slice(&message.data_header);
        check(&message)?;
        Ok(message)
    });
    let mut failed = false;
    // Nothing of the decoder is used after it panicked.
    AssertUnwindSafe(FlightDataDecoder::new(messages))
        .catch_unwind()
        .map(|message| {
            message.unwrap_or_else(|_| {
                Err(FlightError::DecodeError(
                    "a message is no valid Arrow: its decoder panicked".into(),
                ))
            })
        })
        .take_while(move |message| {
            let go_on = !failed;
            failed = message.is_err();
            std::future::ready(go_on)
        })
}

/// Arrow panics where a header names buffers that its body does not have.
fn check(message: &FlightData) -> Result<(), FlightError> {
    // What is no message at all is an error of the decoder.
    let Ok(header) = arrow_ipc::root_as_message(&message.data_header) else { return Ok(()) };
    let dictionary = header.header_as_dictionary_batch().and_then(|batch| batch.data());
    let Some(batch) = header.header_as_record_batch().or(dictionary) else { return Ok(()) };
    let len = message.data_body.len();
    for buffer in batch.buffers().into_iter().flatten() {
        let (offset, buffer_len) = (buffer.offset(), buffer.length());
        let end = u64::try_from(offset).ok().zip(u64::try_from(buffer_len).ok());
        let end = end.and_then(|(offset, len)| offset.checked_add(len));
        if end.is_none_or(|end| end > len as u64) {
            return Err(FlightError::DecodeError(format!(
                "the message names a buffer of {buffer_len} bytes at {offset}, its body has {len} bytes"
            )));
        }
    }
    Ok(())
}
