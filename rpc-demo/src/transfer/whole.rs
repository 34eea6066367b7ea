//! Transfers a file, an object or a range in one call.

use std::pin::pin;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::pieces::Pieces;
use super::target::LocalFile;
use crate::attributes::Attributes;
use crate::digest::Digest;
use crate::failure::Failure;
use crate::net::Connection;
use crate::pb::PutRequest;
use crate::pb::put_request::Head;
use crate::progress::Bar;
use crate::sink::{Part, Pending, Room, Writer, write_at};
use crate::source::Piece;

/// Sends one object, or one range of an object, in a single put, and returns the digest of the
/// bytes.
pub(crate) async fn send(
    connection: &Connection,
    head: Head,
    mut pieces: Pieces,
    what: &str,
    bar: &Bar,
) -> Result<Digest, Failure> {
    let (feed, requests) = mpsc::channel(1);
    let read = async move {
        let mut head = Some(head);
        loop {
            let Piece { data, end } = pieces.next().await?;
            let sent = data.len();
            let request = PutRequest { head: head.take(), data, digest: end.map(Into::into) };
            if feed.send(request).await.is_err() {
                // The call has ended and accepts no more data.
                return Ok(None);
            }
            bar.add(sent);
            if end.is_some() {
                return Ok(end);
            }
        }
    };
    let mut store = connection.store();
    let mut call = pin!(store.put(ReceiverStream::new(requests)));
    let mut read = pin!(read);
    let mut reading = None;
    let answer = loop {
        tokio::select! {
            ended = &mut read, if reading.is_none() => match ended {
                // Return at once. The server has not received the digest, so it discards the data.
                Err(failure) => return Err(failure),
                Ok(sent) => reading = Some(sent),
            },
            answer = &mut call => break answer,
        }
    };
    let stored = match answer {
        Ok(answer) => answer.into_inner().stored.map(Digest::from),
        Err(status) => return Err(Failure::status(what, &status)),
    };
    match (reading.flatten(), stored) {
        (None, _) => Err(Failure::new(
            what,
            "the server answered before it had all of it",
            "see the server's log",
        )),
        (Some(sent), Some(stored)) if sent == stored => Ok(sent),
        (Some(sent), stored) => {
            let stored = stored.map_or("nothing".to_owned(), |stored| stored.to_string());
            Err(Failure::new(
                what,
                format!("the server stored {stored} where {sent} was sent"),
                "put it again",
            ))
        }
    }
}

/// Writes the data to a new file, renames the file once it is complete, and returns its digest.
/// `size` is the announced size.
pub(super) async fn receive(
    place: &LocalFile,
    mut pieces: Pieces,
    size: u64,
    attributes: Attributes,
    what: &str,
    bar: &Bar,
) -> Result<Digest, Failure> {
    let failed = |error: std::io::Error| place.cannot_write(&error);
    let first = pieces.next().await?;
    let here = place.clone();
    let private = attributes.mode.is_some();
    if let Piece { data, end: Some(promised) } = first {
        // The content is complete: one disk operation suffices.
        let data = pieces.body().settle(data);
        let arrived = Digest::of(&data);
        checked(what, arrived, promised, size)?;
        bar.add(data.len());
        let write = move || {
            let pending = here.temporary(private)?;
            write_at(pending.file(), &data, 0)?;
            here.place(pending, &attributes)
        };
        super::origin::blocking(write).await.map_err(failed)?;
        return Ok(arrived);
    }
    let create = move || here.temporary(private);
    let pending: Pending = super::origin::blocking(create).await.map_err(failed)?;
    let room = Part { file: pending.file().clone(), offset: 0 };
    let (arrived, promised) = write(place, room, first, pieces, what, bar).await?;
    checked(what, arrived, promised, size)?;
    let here = place.clone();
    super::origin::blocking(move || here.place(pending, &attributes)).await.map_err(failed)?;
    Ok(arrived)
}

/// Writes the first piece, which has arrived, and all further pieces. Returns the digest of the
/// bytes that arrived and the digest that the sender announced.
pub(super) async fn write(
    place: &LocalFile,
    room: impl Room,
    first: Piece,
    mut pieces: Pieces,
    what: &str,
    bar: &Bar,
) -> Result<(Digest, Digest), Failure> {
    let failed = |error: std::io::Error| place.cannot_write(&error);
    let mut writer = Writer::start(room, pieces.body());
    let mut piece = first;
    loop {
        let length = piece.data.len();
        if length > 0 && writer.push(piece.data).await.is_err() {
            // The disk failed; `finish` returns the error.
            writer.finish().await.map_err(failed)?;
            return Err(Failure::new(what, "the writer stopped", ""));
        }
        bar.add(length);
        if let Some(promised) = piece.end {
            return Ok((writer.finish().await.map_err(failed)?, promised));
        }
        piece = pieces.next().await?;
    }
}

/// Checks that the received data has the sender's digest and the announced size.
pub(super) fn checked(
    what: &str,
    arrived: Digest,
    promised: Digest,
    size: u64,
) -> Result<(), Failure> {
    if arrived == promised && promised.size == size {
        return Ok(());
    }
    let why = format!(
        "{arrived} came where {promised} was sent and {size} bytes were announced; nothing was kept"
    );
    Err(Failure::new(what, why, "get it again").not_resumable())
}
