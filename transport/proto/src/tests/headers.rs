//! Header blocks, and the tables that both ends keep.

use bytes::{Bytes, BytesMut};
use tonic_rdma_source_rules::golden::Document;

use super::golden;
use crate::headers::table::{Received, Sent};
use crate::headers::{Decoder, NAMES, PAIRS, encode};

fn block(fields: &[(&str, &str)]) -> Bytes {
    let mut block = BytesMut::new();
    fields.iter().for_each(|(name, value)| encode(&mut block, name, value.as_bytes()).unwrap());
    block.freeze()
}

#[test]
fn fields_have_their_bytes() {
    let (golden, document) = (golden(), Document::protocol());
    let mut all: Vec<(&str, &str)> = NAMES.into_iter().map(|name| (name, "v")).collect();
    all.extend(PAIRS);
    let cases: [(&str, &[(&str, &str)]); 4] = [
        ("BLOCK/literal", &[("x-id", "value")]),
        ("BLOCK/name", &[(":path", "/a.B/C")]),
        ("BLOCK/pair", &[("te", "trailers")]),
        ("BLOCK/static", &all),
    ];
    for (name, fields) in cases {
        let case = golden.case(name);
        case.assert_bytes(&block(fields));
        let decoded = Decoder::new(case.bytes().into()).map(Result::unwrap);
        let decoded: Vec<_> = decoded.map(|field| (field.name, field.value)).collect();
        let fields: Vec<_> =
            fields.iter().map(|(n, v)| (Bytes::from(*n), Bytes::from(*v))).collect();
        assert_eq!(decoded, fields, "{name}");
        if name != "BLOCK/static" {
            let kind = name["BLOCK/".len()..].to_owned();
            document.assert_table(&format!("#### Field: {kind}"), &case.layout());
        }
    }
    assert_eq!(golden.names("BLOCK/").len(), cases.len());
    let names = NAMES.iter().zip(1..).map(|(name, n): (_, u8)| [n.to_string(), (*name).into()]);
    document.assert_table("#### Static names", &names.collect::<Vec<_>>());
    let pairs = PAIRS.iter().zip(128..);
    let pairs = pairs.map(|(pair, n): (_, u8)| [n.to_string(), pair.0.into(), pair.1.into()]);
    document.assert_table("#### Static pairs", &pairs.collect::<Vec<_>>());
}

#[test]
fn fields_of_the_table_have_their_bytes() {
    let (golden, document) = (golden(), Document::protocol());
    let (mut sent, mut received) = (Sent::default(), Received::default());
    let block = block(&[(":path", "/a.B/C")]);
    for name in ["TABLE/define", "TABLE/entry"] {
        let (case, mut wire) = (golden.case(name), [0; 64]);
        let len = sent.shorten(&block, &mut wire).unwrap();
        case.assert_bytes(&wire[..len]);
        assert_eq!(received.expand(&case.bytes(), 100), Ok(Some(block.clone())), "{name}");
        document.assert_table(&format!("#### Field: {}", &name["TABLE/".len()..]), &case.layout());
    }
    assert_eq!(golden.names("TABLE/").len(), 2);
}
