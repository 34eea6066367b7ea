//! Reads a device's PCI Express link.

use crate::diagnose::host::system_files::SystemFiles;
use crate::diagnose::report::PcieLink;

/// The link of the PCI device in this directory. A virtual function uses its physical function's
/// link.
pub(super) fn link(files: &SystemFiles, dir: &str) -> Option<PcieLink> {
    let of = |dir: &str| {
        let read = |file: &str| files.read(&format!("{dir}/{file}"));
        Some(PcieLink {
            gt_s: speed(&read("current_link_speed")?)?,
            lanes: lanes(&read("current_link_width")?)?,
            max_gt_s: speed(&read("max_link_speed")?)?,
            max_lanes: lanes(&read("max_link_width")?)?,
        })
    };
    of(dir).or_else(|| of(&format!("{dir}/physfn")))
}

/// Parses `16.0 GT/s PCIe`. `Unknown` gives `None`.
fn speed(text: &str) -> Option<f64> {
    let (number, _) = text.split_once(" GT/s")?;
    number.parse().ok().filter(|speed| *speed > 0.0)
}

/// The number of lanes. 0 and 255 mean that it is unknown.
fn lanes(text: &str) -> Option<u32> {
    text.parse().ok().filter(|lanes| (1..=32).contains(lanes))
}

impl PcieLink {
    /// Approximate payload in Gb/s that the link carries in each direction.
    pub(in crate::diagnose) fn gbit_s(&self) -> f64 {
        // The encoding of the lane, and the share of payload in packets of 256 bytes.
        let code = if self.gt_s > 5.0 { 128.0 / 130.0 } else { 0.8 };
        self.gt_s * f64::from(self.lanes) * code * 0.9
    }

    /// Whether the device could run at a higher speed or on more lanes.
    pub(in crate::diagnose) fn is_reduced(&self) -> bool {
        self.gt_s < self.max_gt_s || self.lanes < self.max_lanes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_and_lanes() {
        assert_eq!(speed("16.0 GT/s PCIe"), Some(16.0));
        assert_eq!(speed("8 GT/s"), Some(8.0));
        for bad in ["", "Unknown", "Unknown speed", "x GT/s", "0 GT/s", "-1 GT/s"] {
            assert_eq!(speed(bad), None, "{bad}");
        }
        assert_eq!(["16", "0", "255", ""].map(lanes), [Some(16), None, None, None]);
    }

    #[test]
    fn a_link_carries_less_than_its_lanes_transfer() {
        let link = PcieLink { gt_s: 8.0, lanes: 8, max_gt_s: 16.0, max_lanes: 8 };
        assert!((56.0..57.0).contains(&link.gbit_s()) && link.is_reduced());
        let old = PcieLink { gt_s: 5.0, lanes: 8, max_gt_s: 5.0, max_lanes: 8 };
        assert!((28.0..29.0).contains(&old.gbit_s()) && !old.is_reduced());
    }
}
