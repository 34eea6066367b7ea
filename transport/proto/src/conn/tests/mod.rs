//! Pairs of connections under a virtual clock.

use super::*;

#[test]
fn clip_keeps_whole_characters() {
    let text = "é".repeat(200);
    assert_eq!(clip(&text).len(), MAX_TEXT);
    assert_eq!(clip(&text[..]).len() % 2, 0);
}
