//! Decodes received messages into record batches.

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
/// The columns lie where the body of their message landed. The body is not copied, because with
/// tonic-rdma it begins at a multiple of 64 bytes. There are two exceptions: a compressed body is
/// decompressed into the heap, and arrow copies a buffer that its writer did not align. The landing
/// memory returns to its pool when the last array of the batch is dropped.
///
/// Each message's header, some hundred bytes, is copied first. Arrow checks the header once and
/// then relies on it, while the peer may still write to landed data. The peer may also write to the
/// body. Arrow also relies on the offsets of strings and lists after it has checked them. So do not
/// read columns of an untrusted peer in place: see docs/flight.md.
///
/// # Errors
/// An error of the call, or an error that arrow reports about a message, ends the stream. Arrow
/// panics on some malformed messages. The stream then also ends with a
/// [`FlightError::DecodeError`], unless the program aborts on panics.
pub fn batches<S>(messages: S) -> impl Stream<Item = Result<RecordBatch, FlightError>> + Send
where
    S: Stream<Item = Result<FlightData, Status>> + Send + 'static,
{
    self::messages(messages).try_filter_map(async |message| match message.payload {
        DecodedPayload::RecordBatch(batch) => Ok(Some(batch)),
        DecodedPayload::Schema(_) | DecodedPayload::None => Ok(None),
    })
}

/// Like [`batches`], but also returns the message of each batch and schema, and messages that have
/// only metadata.
///
/// # Errors
/// The errors of [`batches`].
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
    // The decoder is not used after a panic.
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

/// Checks that the body has the buffers that the header names. Otherwise arrow panics.
fn check(message: &FlightData) -> Result<(), FlightError> {
    // The decoder reports an error if the data is not a message at all.
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
