//! A small seeded generator (splitmix64), so that the same seed gives the same run.

#[derive(Debug, Clone)]
pub(super) struct Rng(u64);

impl Rng {
    /// Creates a generator. `stream` distinguishes generators with the same seed.
    pub(super) fn new(seed: u64, stream: u64) -> Rng {
        let mut rng = Rng(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        rng.next();
        rng
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number from 0 to `max`, both included.
    pub(super) fn up_to(&mut self, max: u32) -> u32 {
        if max == 0 {
            return 0;
        }
        (self.next() % (u64::from(max) + 1)) as u32
    }

    /// Returns true once in `n` draws on average, and never if `n` is 0.
    pub(super) fn one_in(&mut self, n: u32) -> bool {
        n > 0 && self.next().is_multiple_of(u64::from(n))
    }
}
