//! Bounds for a run: on counts, and on ratios within the run, but not on times.
//!
//! ```text
//! ROW:CONTENDER[:FIGURE]<=NUMBER             a count: bulk-16:shm:registrations<=0.01
//! ROW:CONTENDER[:FIGURE]/ROW>=NUMBER         its ratio to a row: bulk-16:shm/bulk-1>=0.8
//! ROW:CONTENDER[:FIGURE]/CONTENDER>=NUMBER   its ratio to a contender: bulk-16:shm/tonic-tcp>=2
//! ```
//!
//! `super::figure` defines the rows and figures.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context as _, ensure};
use clap::ValueEnum as _;

use crate::contender::Contender;
use crate::scale::figure::{Figure, Row, Unit};
use crate::scale::record::Run;

/// One bound.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    row: Row,
    contender: String,
    figure: Figure,
    /// The row and contender to compare the figure with.
    to: Option<(Row, String)>,
    at_most: bool,
    limit: f64,
}

const FORM: &str = "a bound has the form ROW:CONTENDER[:FIGURE][/ROW or /CONTENDER]<=NUMBER, or >=";

impl FromStr for Bound {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (at_most, (subject, limit)) = match (text.split_once("<="), text.split_once(">=")) {
            (Some(parts), _) => (true, parts),
            (None, Some(parts)) => (false, parts),
            (None, None) => anyhow::bail!(FORM),
        };
        let limit: f64 = limit.parse().with_context(|| format!("{limit} is not a number"))?;
        let (subject, to) = match subject.split_once('/') {
            Some((subject, to)) => (subject, Some(to)),
            None => (subject, None),
        };
        let (row, rest) = subject.split_once(':').context(FORM)?;
        let (who, name) = match rest.split_once(':') {
            Some((who, name)) => (who, Some(name)),
            None => (rest, None),
        };
        let (row, contender) = (row.parse::<Row>()?, contender(who)?);
        let figure = Figure::of(row, name)?;
        let to = match to {
            None => None,
            Some(to) => Some(match to.parse::<Row>() {
                Ok(other) => {
                    Figure::of(other, Some(figure.name))?;
                    (other, contender.clone())
                }
                Err(_) => (row, self::contender(to)?),
            }),
        };
        ensure!(
            to.is_some() || figure.unit == Unit::Count,
            "{} is a time, and can only be compared within a run: {FORM}",
            figure.name
        );
        Ok(Self { row, contender, figure, to, at_most, limit })
    }
}

fn contender(name: &str) -> anyhow::Result<String> {
    let found = Contender::from_str(name, false);
    found
        .map(Contender::name)
        .map_err(|_| anyhow::anyhow!("{name} is neither a contender nor a row"))
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row, contender, figure, to, .. } = self;
        write!(f, "{row}: {} of {contender}", figure.name)?;
        match to {
            None => Ok(()),
            Some((other, who)) if who == contender => write!(f, " to {other}"),
            Some((_, who)) => write!(f, " to {who}"),
        }
    }
}

impl Bound {
    /// Checks the bound, and describes it with the actual value.
    ///
    /// # Errors
    /// The run violates the bound, or lacks the figure.
    pub fn check(&self, run: &Run) -> anyhow::Result<String> {
        let Self { row, contender, figure, to, at_most, limit } = self;
        let value = match to {
            None => figure.median(run, *row, contender),
            Some((other, who)) => figure.ratio(run, (*row, contender), (*other, who)),
        };
        let value = value.with_context(|| format!("{self} was not measured in this run"))?;
        let kept = if *at_most { value <= *limit } else { value >= *limit };
        let sign = if *at_most { "at most" } else { "at least" };
        ensure!(kept, "{self} is {value:.4}, {sign} {limit} wanted");
        Ok(format!("{self} is {value:.4}, {sign} {limit} wanted: kept"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scale::figure::tests::run;

    fn check(text: &str) -> Result<String, String> {
        text.parse::<Bound>().unwrap().check(&run()).map_err(|error| error.to_string())
    }

    #[test]
    fn counts_and_ratios_are_held() {
        let kept = check("bulk-2:shm:registrations<=0.5").unwrap();
        assert_eq!(kept, "bulk-2: registrations of shm is 0.5000, at most 0.5 wanted: kept");
        check("bulk-2:shm/bulk-1>=1.5").unwrap();
        check("bulk-2:shm/tonic-tcp>=6").unwrap();
        check("bulk-2:shm:fairness>=0.5").unwrap();
        check("connections-101:shm:descriptors<=5").unwrap();
        check("connections-101:shm:one-cpu/connections-1<=2").unwrap();
        check("connections-101:shm:all-cpu/tonic-tcp<=0.4").unwrap();
        check("connections-101:shm/connections-1>=0.5").unwrap();
        for (text, message) in [
            (
                "bulk-2:shm:registrations<=0.01",
                "bulk-2: registrations of shm is 0.5000, at most 0.01 wanted",
            ),
            ("bulk-2:shm:pressure<=0", "bulk-2: pressure of shm is 0.2500, at most 0 wanted"),
            (
                "bulk-2:shm/bulk-1>=1.6",
                "bulk-2: rate of shm to bulk-1 is 1.5000, at least 1.6 wanted",
            ),
            (
                "connections-101:shm:all-cpu/tonic-tcp<=0.3",
                "connections-101: all-cpu of shm to tonic-tcp is 0.3125, at most 0.3 wanted",
            ),
        ] {
            assert_eq!(check(text), Err(message.to_owned()));
        }
    }

    #[test]
    fn what_was_not_measured_keeps_no_bound() {
        for text in [
            "bulk-64:shm:registrations<=0.01",
            "bulk-2:verbs:registrations<=0.01",
            "bulk-2:tonic-tcp:registrations<=0.01",
            "bulk-2:shm/bulk-64>=0",
            "connections-1:shm:descriptors<=5",
        ] {
            let message = check(text).unwrap_err();
            assert!(message.ends_with("was not measured in this run"), "{message}");
        }
        let mut failed = run();
        failed.bulk[3].failure = Some("no".into());
        let bound: Bound = "bulk-2:shm:registrations<=1".parse().unwrap();
        assert!(bound.check(&failed).is_err(), "a failure keeps no bound");
    }

    #[test]
    fn times_need_another_beside_them() {
        for text in [
            "bulk-2:shm:cpu<=1",
            "bulk-2:shm>=1000",
            "connections-101:shm:one-cpu<=7",
            "connections-101:shm:rest-cpu<=2",
            "streams-10:shm<=9",
        ] {
            let message = text.parse::<Bound>().unwrap_err().to_string();
            assert!(message.contains("is a time"), "{text}: {message}");
        }
    }

    #[test]
    fn a_bad_bound_says_what_is_wrong() {
        for (text, message) in [
            ("", "has the form"),
            ("bulk-2:shm", "has the form"),
            ("bulk-2<=1", "has the form"),
            ("bulk-2:shm:registrations<=x", "x is not a number"),
            ("bulk-2:shn:registrations<=1", "shn is neither a contender nor a row"),
            ("bunk-2:shm:registrations<=1", "bunk-2 is not a row"),
            ("bulk-2:shm:descriptors<=1", "bulk-2 has no descriptors, but rate, fairness"),
            ("bulk-2:shm/connections-1<=1", "connections-1 has no rate"),
            ("bulk-2:shm/bulk<=1", "bulk is neither a contender nor a row"),
        ] {
            let error = format!("{:#}", text.parse::<Bound>().unwrap_err());
            assert!(error.contains(message), "{text}: {error}");
        }
    }
}
