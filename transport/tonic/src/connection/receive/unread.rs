//! The unread part of a received body.
//!
//! The peer decides into which pieces it cuts a body, and the stream's windows count only payload.
//! But a piece occupies more memory than its payload:
//!
//! | piece | occupies, in addition to [`OVERHEAD`] |
//! |---|---|
//! | in a control message | the buffer of [`RECEIVE_CHUNK`] bytes that the message was copied to, together with other messages |
//! | landed | its granules, which include memory before and after it |
//! | landed, then copied to the heap | its length |
//! | lent | the few bytes around the lent bytes, which count like a control message |
//!
//! So a piece that occupies more than 3/2 of its length is copied to a buffer of the stream, if
//! other pieces before it are unread:
//!
//! | unread | piece | action |
//! |---|---|---|
//! | nothing | any | queued as it is, because the reader usually takes it immediately |
//! | something | occupies at most 3/2 of its length | queued as it is, behind the buffer, which is closed and keeps little unused memory |
//! | something | occupies more | copied to the buffer; if the buffer would exceed [`MAX_JOINED`] bytes, a new buffer begins |
//! | something | lent | queued, with a copy of the bytes around the lent bytes |
//!
//! Unread payload therefore occupies at most 3/2 of its length, plus the last buffer (at most its
//! length again, or [`MAX_JOINED`]), plus the first piece's memory.

use bytes::{BufMut, Bytes, BytesMut};
use tonic_rdma_proto::Flow;

use crate::codec::Fifo;
use crate::codec::Part;

/// Received messages share buffers of this many bytes.
pub(crate) const RECEIVE_CHUNK: usize = 32 * 1024;
/// Landing memory is allocated in units of this many bytes.
const GRANULE: usize = 4096;
/// Bytes of bookkeeping for each piece: one or two allocations, and two slots of the queue, because
/// half of the queue's slots may be free.
const OVERHEAD: usize = 192;
/// Maximum length in bytes of a buffer of joined pieces.
const MAX_JOINED: usize = 64 * 1024;
/// Minimum length in bytes of the first buffer of joined pieces.
const MIN_JOINED: usize = 256;

/// The kind of memory that holds received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PayloadPlace {
    /// A buffer of received messages.
    Message,
    /// Landing memory, `begin` bytes after the start of a granule.
    Landing { begin: u32 },
    /// An application buffer.
    Named,
    /// Memory that the peer has lent.
    Lent,
    /// Landing memory that is copied to the heap on delivery, because the stream's reader lags.
    Heap,
}

/// Payload that has arrived for a stream.
pub(crate) struct Arrival {
    pub(crate) part: Part,
    pub(crate) flow: Flow,
    pub(crate) place: PayloadPlace,
    /// Whether this is the last payload of the body.
    pub(crate) end: bool,
}

/// A piece of a received body.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) part: Part,
    /// Bytes that count as [`Flow::Window`].
    window: u32,
    /// Bytes that count as [`Flow::Bulk`]. The piece's remaining bytes count in no window.
    bulk: u32,
    /// Bytes that did not arrive in a control message.
    landed: u32,
    /// Whether the piece was joined from several pieces.
    joined: bool,
}

impl Piece {
    /// The numbers of bytes that count in each window.
    #[inline]
    pub(crate) fn flows(&self) -> [(u32, Flow); 2] {
        [(self.window, Flow::Window), (self.bulk, Flow::Bulk)]
    }

    /// The number of bytes that arrived by WRITE and were joined with other bytes.
    #[inline]
    pub(crate) fn landed_and_joined(&self) -> u32 {
        if self.joined { self.landed } else { 0 }
    }
}

/// The last unread pieces, while they are being joined.
#[derive(Debug, Default)]
struct Joining {
    bytes: BytesMut,
    window: u32,
    bulk: u32,
    landed: u32,
}

impl Joining {
    fn into_piece(self) -> Piece {
        let Joining { bytes, window, bulk, landed } = self;
        let bytes = match bytes.capacity() - bytes.len() > bytes.len() / 4 {
            true => Bytes::copy_from_slice(&bytes),
            false => bytes.freeze(),
        };
        // The copy is an eager part, because only this process writes to it.
        Piece { part: Part::Eager(bytes), window, bulk, landed, joined: true }
    }
}

/// The unread pieces of one stream, in the order of the body. Each piece has at least one byte.
#[derive(Debug, Default)]
pub(crate) struct Unread {
    pieces: Fifo<Piece>,
    /// The pieces that are being joined. These pieces follow all other pieces.
    joining: Option<Box<Joining>>,
}

impl Unread {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.joining.is_none()
    }

    /// Whether [`push`](Self::push) would copy `len` bytes.
    #[inline]
    pub(crate) fn joins(&self, len: usize, place: PayloadPlace) -> bool {
        if self.is_empty() {
            return false;
        }
        let kept = match place {
            PayloadPlace::Message => RECEIVE_CHUNK,
            PayloadPlace::Landing { begin } => (begin as usize + len).next_multiple_of(GRANULE),
            PayloadPlace::Named | PayloadPlace::Lent => return false,
            PayloadPlace::Heap => len,
        };
        kept + OVERHEAD > len + len / 2
    }

    /// Adds a piece. A piece for the heap is copied in any case.
    pub(crate) fn push(&mut self, part: Part, flow: Flow, place: PayloadPlace) {
        let len = part.len();
        let landed = if place == PayloadPlace::Message { 0 } else { len as u32 };
        let (window, bulk) = match flow {
            Flow::Window => (len as u32, 0),
            Flow::Bulk => (0, len as u32),
            Flow::Named | Flow::Lent => (0, 0),
        };
        if !self.joins(len, place) {
            let waits = !self.is_empty();
            self.close();
            let part = match part {
                Part::Lent(mut piece) if waits => {
                    piece.head = Bytes::copy_from_slice(&piece.head);
                    piece.tail = Bytes::copy_from_slice(&piece.tail);
                    Part::Lent(piece)
                }
                Part::Landed(landed) if place == PayloadPlace::Heap => {
                    Part::Landed(landed.to_private().into())
                }
                part => part,
            };
            return self.pieces.push_back(Piece { part, window, bulk, landed, joined: false });
        }
        let full = |joining: &Joining| joining.bytes.len() + len > MAX_JOINED;
        let first = if self.joining.as_deref().is_some_and(full) {
            self.close();
            MAX_JOINED
        } else {
            MIN_JOINED
        };
        let joining = self.joining.get_or_insert_default();
        if joining.bytes.capacity() == 0 {
            joining.bytes = BytesMut::with_capacity(first.max(2 * len));
        }
        match part {
            Part::Eager(bytes) => joining.bytes.put_slice(&bytes),
            Part::Landed(landed) => landed.append_to(&mut joining.bytes),
            Part::Lent(piece) => piece.append_to(&mut joining.bytes),
        }
        joining.window += window;
        joining.bulk += bulk;
        joining.landed += landed;
    }

    /// Whether unread data occupies landing memory.
    pub(crate) fn has_landed(&self) -> bool {
        self.pieces.iter().any(|piece| piece.part.is_in_pool())
    }

    /// Copies data from landing memory to the heap, piece by piece, until at least `limit` bytes
    /// are copied. Returns the number of bytes, and whether no unread data is left in landing
    /// memory.
    pub(crate) fn copy_out(&mut self, limit: usize) -> (usize, bool) {
        let mut copied = 0;
        for piece in self.pieces.iter_mut() {
            if let Part::Landed(landed) = &mut piece.part
                && landed.is_in_pool()
            {
                if copied >= limit {
                    return (copied, false);
                }
                copied += landed.len();
                *landed = landed.to_private().into();
            }
        }
        (copied, true)
    }

    /// Closes the buffer, so that later pieces are not joined with the pieces in it.
    fn close(&mut self) {
        if let Some(joining) = self.joining.take() {
            self.pieces.push_back(joining.into_piece());
        }
    }

    /// The numbers of all unread bytes that count in each window.
    #[inline]
    pub(crate) fn flows(&self) -> [(u32, Flow); 2] {
        let joining = self.joining.as_deref().map(|joining| (joining.window, joining.bulk));
        let pieces = self.pieces.iter().map(|piece| (piece.window, piece.bulk));
        let (mut window, mut bulk) = (0, 0);
        for (of_window, of_bulk) in pieces.chain(joining) {
            window += of_window;
            bulk += of_bulk;
        }
        [(window, Flow::Window), (bulk, Flow::Bulk)]
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Piece> {
        self.pieces.pop_front().or_else(|| Some(self.joining.take()?.into_piece()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tonic_rdma_fabric::Fabric;
    use tonic_rdma_fabric::sim::{SimConfig, SimNet};
    use tonic_rdma_memory::{Pool, PoolConfig};

    use super::*;

    const LANDING: PayloadPlace = PayloadPlace::Landing { begin: 0 };

    fn part(bytes: Bytes, place: PayloadPlace) -> Part {
        match place {
            PayloadPlace::Message => Part::Eager(bytes),
            PayloadPlace::Landing { .. }
            | PayloadPlace::Named
            | PayloadPlace::Lent
            | PayloadPlace::Heap => Part::Landed(bytes.into()),
        }
    }

    /// The bytes of a piece, and whether it is delivered from landing memory.
    fn shown(piece: Piece) -> (Bytes, bool) {
        match piece.part {
            Part::Eager(bytes) => (bytes, false),
            Part::Landed(landed) => (landed.lend(), true),
            Part::Lent(piece) => panic!("nothing is lent here: {piece:?}"),
        }
    }

    /// Memory that the pieces occupy in the worst case: no piece shares a buffer or a granule with
    /// another piece, and each landed piece begins `begin` bytes into its granule.
    fn kept(unread: &Unread, begin: usize) -> usize {
        let piece = |piece: &Piece| match (piece.joined, piece.landed) {
            (true, _) => piece.part.len() * 5 / 4 + OVERHEAD,
            (false, 0) => RECEIVE_CHUNK + OVERHEAD,
            (false, len) => (begin + len as usize).next_multiple_of(GRANULE) + OVERHEAD,
        };
        let joining = unread.joining.as_ref().map_or(0, |joining| joining.bytes.capacity());
        unread.pieces.iter().map(piece).sum::<usize>() + joining
    }

    fn all(mut unread: Unread) -> (Vec<u8>, [u32; 2]) {
        let (mut bytes, mut flows) = (Vec::new(), [0, 0]);
        while let Some(piece) = unread.pop() {
            let [window, bulk] = piece.flows();
            let (piece, _) = shown(piece);
            assert!(!piece.is_empty());
            bytes.extend_from_slice(&piece);
            assert_eq!((window.1, bulk.1), (Flow::Window, Flow::Bulk));
            flows = [flows[0] + window.0, flows[1] + bulk.0];
        }
        assert!(unread.is_empty());
        (bytes, flows)
    }

    /// An earlier version copied everything in one turn of the driver.
    #[test]
    fn what_nobody_reads_is_copied_in_steps() {
        const LEN: usize = 64 << 10;
        let device = SimNet::new(SimConfig::default()).device("sim0", "10.0.0.1".parse().unwrap());
        let pool = Pool::new(PoolConfig::default(), Fabric::Sim(device).registrar()).unwrap();
        let mut landing = pool.landing();
        let mut unread = Unread::default();
        for n in 0..10 {
            let landed = landing.alloc(LEN, LEN).unwrap().unwrap().filled(LEN);
            assert_eq!(unread.pieces.iter().count(), n);
            unread.push(Part::Landed(landed), Flow::Bulk, LANDING);
        }
        let steps: Vec<_> = (0..5).map(|_| unread.copy_out(2 * LEN + 1)).collect();
        let expected =
            [(3 * LEN, false), (3 * LEN, false), (3 * LEN, false), (LEN, true), (0, true)];
        assert_eq!(steps, expected);
        assert_eq!(unread.flows()[1], (10 * LEN as u32, Flow::Bulk));
    }

    #[test]
    fn what_is_read_at_once_is_not_copied() {
        let mut unread = Unread::default();
        for place in [PayloadPlace::Message, LANDING] {
            let bytes = Bytes::from(vec![1; 100]);
            for _ in 0..10 {
                unread.push(part(bytes.clone(), place), Flow::Window, place);
                let (piece, landed) = shown(unread.pop().unwrap());
                assert_eq!(piece.as_ptr(), bytes.as_ptr());
                assert_eq!((landed, unread.is_empty()), (place == LANDING, true));
            }
        }
    }

    #[test]
    fn long_pieces_stay_where_they_landed() {
        let mut unread = Unread::default();
        for len in [8192, 100_000, 1 << 20] {
            let bytes = Bytes::from(vec![1; len]);
            for _ in 0..3 {
                unread.push(part(bytes.clone(), LANDING), Flow::Bulk, LANDING);
            }
            for _ in 0..3 {
                let (piece, landed) = shown(unread.pop().unwrap());
                assert_eq!((piece.as_ptr(), landed), (bytes.as_ptr(), true));
            }
        }
    }

    #[test]
    fn what_is_to_lie_on_the_heap_is_copied_wherever_it_goes() {
        let mut unread = Unread::default();
        let pieces = [10, 10, 100_000].map(|len| Bytes::from(vec![1; len]));
        for bytes in &pieces {
            unread.push(part(bytes.clone(), PayloadPlace::Heap), Flow::Window, PayloadPlace::Heap);
        }
        for bytes in &pieces {
            let (piece, _) = shown(unread.pop().unwrap());
            assert_eq!(piece, bytes);
            assert_ne!(piece.as_ptr(), bytes.as_ptr());
        }
    }

    /// Checks pieces of each kind, and the worst mixtures, for a window of 2 MiB.
    #[test]
    fn a_window_of_any_pieces_keeps_at_most_twice_its_length() {
        let kinds: [&[(usize, PayloadPlace)]; 9] = [
            &[(1, PayloadPlace::Message)],
            &[(4000, PayloadPlace::Message)],
            &[(1, LANDING)],
            &[(2700, LANDING)],
            &[(5000, LANDING)],
            &[(1, PayloadPlace::Heap)],
            &[(1, PayloadPlace::Message), (1, LANDING)],
            &[(2860, LANDING), (1, PayloadPlace::Message)],
            &[
                (5600, LANDING),
                (4000, PayloadPlace::Message),
                (400, PayloadPlace::Heap),
                (33_000, PayloadPlace::Heap),
            ],
        ];
        let runs =
            kinds.into_iter().flat_map(|kind| [0, 42, 63, 2048, 4095].map(|begin| (kind, begin)));
        for (kind, begin) in runs {
            let (mut unread, mut window) = (Unread::default(), 2 << 20);
            for &(len, place) in kind.iter().cycle() {
                let place = if place == LANDING { PayloadPlace::Landing { begin } } else { place };
                if len > window {
                    break;
                }
                window -= len;
                unread.push(part(vec![0; len].into(), place), Flow::Window, place);
            }
            let kept = kept(&unread, begin as usize);
            assert!(kept <= (4 << 20) - RECEIVE_CHUNK, "{kind:?} from {begin} on keep {kept}");
        }
    }

    fn place() -> impl Strategy<Value = PayloadPlace> {
        let landing = (0..4096_u32).prop_map(|begin| PayloadPlace::Landing { begin });
        prop_oneof![Just(PayloadPlace::Message), landing, Just(PayloadPlace::Heap)]
    }

    proptest! {
        #[test]
        fn bytes_and_flows_are_those_that_came(
            steps in prop::collection::vec(
                prop::option::weighted(0.8, (prop_oneof![1..20usize, 1..70_000usize], place(), any::<bool>())),
                0..60,
            ),
        ) {
            let mut unread = Unread::default();
            let (mut expected, mut flows, mut next) = (Vec::new(), [0, 0], 0_u8);
            for step in steps {
                let Some((len, place, bulk)) = step else {
                    if let Some(piece) = unread.pop() {
                        let [window, bulk] = piece.flows();
                        let (piece, _) = shown(piece);
                        prop_assert_eq!(&expected[..piece.len()], &piece[..]);
                        expected.drain(..piece.len());
                        flows = [flows[0] - window.0, flows[1] - bulk.0];
                    }
                    continue;
                };
                next = next.wrapping_add(1);
                let bytes = vec![next; len];
                expected.extend_from_slice(&bytes);
                flows[usize::from(bulk)] += len as u32;
                let flow = if bulk { Flow::Bulk } else { Flow::Window };
                unread.push(part(bytes.into(), place), flow, place);
            }
            prop_assert_eq!(all(unread), (expected, flows));
        }
    }
}
