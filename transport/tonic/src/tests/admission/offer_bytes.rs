//! Offer and Probe have the bytes in golden/offer.txt, and docs/protocol.md lists their schema's
//! fields.

use prost::Message;
use tonic_rdma_source_rules::golden::{Document, Golden};

use crate::bootstrap::limited::MAX_REQUEST;
use crate::bootstrap::pb::offer_response::Outcome;
use crate::bootstrap::pb::{
    Address, FabricOffer, Grant, OfferRequest, OfferResponse, ProbeRequest, ProbeResponse, Refusal,
    Shm, Sim, TcpAddress, Verbs, fabric_offer,
};
use crate::bootstrap::service::{MAX_ANSWER, MAX_FABRICS, MAX_PROBE, MAX_USER_AGENT};
use crate::bootstrap::tickets::TICKET_LEN;

const SCHEMA: &str = include_str!("../../../proto/tonic_rdma/v1/bootstrap.proto");

fn golden() -> Golden {
    Golden::parse(include_str!("../../../golden/offer.txt"))
}

/// Compares a message with its golden bytes. The callers set every field and use no `..`, so this
/// file does not compile until a new field is added here.
fn check<M: Message + Default + PartialEq + std::fmt::Debug>(name: &str, message: &M) {
    let golden = golden();
    let case = golden.case(name);
    case.assert_bytes(&message.encode_to_vec());
    assert_eq!(&M::decode(case.bytes().as_slice()).unwrap(), message, "{name}");
}

fn address(last: u8) -> Address {
    Address {
        ip: format!("10.0.0.{last}"),
        port: 0x1234,
        device: "mlx5_0".into(),
        transport: "RoCE".into(),
    }
}

fn refusal() -> Refusal {
    Refusal { code: "memlock".into(), detail: "why".into(), fabric: "verbs".into() }
}

#[test]
fn offers_have_their_bytes() {
    check(
        "OFFER_REQUEST",
        &OfferRequest {
            version_min: 5,
            version_max: 6,
            fabrics: vec!["shm".into(), "verbs".into()],
            client: Some(TcpAddress { ip: "10.0.0.1".into(), port: 0x1234 }),
            bare: true,
        },
    );
    let fabrics = [
        fabric_offer::Fabric::Shm(Shm { boot_id: "id".into(), socket: "name".into() }),
        fabric_offer::Fabric::Verbs(Verbs { addresses: vec![address(1), address(2)] }),
        fabric_offer::Fabric::Sim(Sim { addresses: vec![address(3)] }),
    ];
    for fabric in &fabrics {
        // A new fabric does not compile here, and must be one of those above.
        match fabric {
            fabric_offer::Fabric::Shm(_)
            | fabric_offer::Fabric::Verbs(_)
            | fabric_offer::Fabric::Sim(_) => {}
        }
    }
    let grant = Grant {
        ticket: b"0123456789abcdef".as_slice().into(),
        lifetime_ms: 10_000,
        fabrics: fabrics.map(|fabric| FabricOffer { fabric: Some(fabric) }).into(),
        refusals: vec![refusal()],
        bare: true,
        user_agent: "tonic/0.14".into(),
    };
    for (name, outcome) in [
        ("OFFER_RESPONSE/grant", Outcome::Grant(grant)),
        ("OFFER_RESPONSE/refusal", Outcome::Refusal(refusal())),
    ] {
        let response = OfferResponse { version_min: 5, version_max: 6, outcome: Some(outcome) };
        check(name, &response);
    }
    let payload = b"bytes".as_slice();
    check("PROBE_REQUEST", &ProbeRequest { payload: payload.into(), answer_bytes: 0x1234 });
    check("PROBE_RESPONSE", &ProbeResponse { payload: payload.into() });
    assert_eq!(golden().names("").len(), 5, "a case that no test looks at");
}

/// Message, field, number and type of each field in the schema.
fn schema() -> Vec<[String; 4]> {
    let (mut message, mut fields) = ("", Vec::new());
    for line in SCHEMA.lines().map(str::trim) {
        let words: Vec<&str> = line.trim_end_matches(';').split(' ').collect();
        match words[..] {
            ["message", name, "{"] => message = name,
            [kind, name, "=", number] if kind != "syntax" => {
                fields.push([message, name, number, kind].map(str::to_owned));
            }
            ["repeated", kind, name, "=", number] => {
                let kind = format!("repeated {kind}");
                fields.push([message.into(), name.into(), number.into(), kind]);
            }
            _ => {}
        }
    }
    fields
}

#[test]
fn every_field_of_the_schema_has_bytes_and_a_row() {
    let (golden, fields) = (golden(), schema());
    assert!(fields.len() > 25, "{fields:?}");
    let all: Vec<&str> = golden
        .names("")
        .into_iter()
        .flat_map(|name| golden.case(name).fields.iter().map(|field| field.name.as_str()))
        .collect();
    for [message, field, ..] in &fields {
        let name = format!("{message}.{field}");
        assert!(all.contains(&name.as_str()), "no case has {name}");
    }
    Document::protocol().assert_table("### Messages of the Offer", &fields);
}

#[test]
fn the_document_has_the_limits_of_the_code() {
    let limits = [
        ("MAX_REQUEST", MAX_REQUEST),
        ("MAX_ANSWER", MAX_ANSWER),
        ("MAX_FABRICS", MAX_FABRICS),
        ("MAX_USER_AGENT", MAX_USER_AGENT),
        ("TICKET_LEN", TICKET_LEN),
        ("MAX_PROBE", MAX_PROBE),
    ];
    let limits = limits.map(|(name, value)| [name.to_owned(), value.to_string()]);
    Document::protocol().assert_table("### Limits of the Offer", &limits);
}
