//! Medians and ratios.

/// The median of `values`; with an even count the mean of the two in the middle, with none NaN.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// Figures of both contenders for one kind of round; the rounds alternate.
#[derive(Clone, Debug, Default)]
pub struct Pairs {
    /// tonic over TCP, round by round.
    pub stock: Vec<f64>,
    /// tonic-rdma, round by round.
    pub rdma: Vec<f64>,
}

impl Pairs {
    /// The median of what tonic-rdma's figure is to stock tonic's in the same round. A machine that
    /// slows down for a while slows both alike.
    pub fn ratio(&self) -> f64 {
        let ratios: Vec<_> = self.rdma.iter().zip(&self.stock).map(|(r, s)| r / s).collect();
        median(&ratios)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_ratio_pairs_rounds() {
        // The machine is ten times slower in the last round: no ratio changes.
        let pairs = Pairs { stock: vec![10.0, 12.0, 1.0], rdma: vec![20.0, 24.0, 2.0] };
        assert_eq!(pairs.ratio(), 2.0);
    }
}
