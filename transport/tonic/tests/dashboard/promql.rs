//! Checks queries of PromQL against what is exported: the names of metrics, the labels and values
//! that matchers name, the labels that each part of a query has, and whether a rate is of something
//! that grows. This parser knows the part of the language that the project's queries use, and
//! refuses the rest.

use std::collections::BTreeSet;

use crate::exported::{Exported, Series, TARGET};

type Labels = BTreeSet<String>;

/// The result of a query, or of a part of one.
#[derive(Debug)]
pub(crate) enum Value {
    Number,
    Vector(Labels),
    /// A range, and whether its metric only grows.
    Range(Labels, bool),
}

use Value::{Number, Range, Vector};

type Parsed<T = Value> = Result<T, String>;

/// Parses a query. Returns the labels of the series that it gives. `variables` are those of the
/// dashboard.
pub(crate) fn check(query: &str, exported: &Exported, variables: &[&str]) -> Parsed<Labels> {
    let mut parser = Parser { rest: query.trim(), exported, variables };
    let result = parser.binary(0).and_then(|result| match (result, parser.rest) {
        (Vector(labels), "") => Ok(labels),
        (_, "") => Err("this is no vector".into()),
        (_, rest) => Err(format!("what is {rest:?}?")),
    });
    result.map_err(|error| format!("{error}\n    in {query}"))
}

/// Binary operators, in order of increasing precedence.
const OPERATORS: [&[&str]; 4] =
    [&["and ", "or ", "unless "], &[">=", "<=", "==", "!=", ">", "<"], &["+", "-"], &["*", "/"]];
const AGGREGATIONS: [&str; 4] = ["sum", "max", "min", "avg"];

struct Parser<'a> {
    rest: &'a str,
    exported: &'a Exported,
    variables: &'a [&'a str],
}

impl<'a> Parser<'a> {
    fn eat(&mut self, token: &str) -> bool {
        let Some(rest) = self.rest.strip_prefix(token) else { return false };
        self.rest = rest.trim_start();
        true
    }

    fn expect(&mut self, token: &str) -> Parsed<()> {
        if self.eat(token) { Ok(()) } else { Err(format!("no {token:?} before {:?}", self.rest)) }
    }

    /// The text before the first character that is not `allowed`.
    fn take(&mut self, allowed: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !allowed(c)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest.trim_start();
        taken
    }

    fn name(&mut self) -> Parsed<&'a str> {
        match self.take(|c| c.is_ascii_alphanumeric() || c == '_') {
            "" => Err(format!("no name before {:?}", self.rest)),
            name => Ok(name),
        }
    }

    fn binary(&mut self, level: usize) -> Parsed {
        let Some(operators) = OPERATORS.get(level) else { return self.operand() };
        let mut left = self.binary(level + 1)?;
        while operators.iter().any(|operator| self.eat(operator)) {
            let on = if self.eat("on") { Some(self.labels()?) } else { None };
            let ignored = if self.eat("ignoring") { self.labels()? } else { Labels::new() };
            let many = self.eat("group_left");
            let right = self.binary(level + 1)?;
            left = match (left, right) {
                (Number, Number) => Number,
                (Vector(labels), Number) | (Number, Vector(labels)) => Vector(labels),
                (Vector(left), Vector(right)) => {
                    let of = |labels: &Labels| match &on {
                        Some(on) if !on.is_subset(labels) => {
                            Err(format!("on {on:?}, but there are {labels:?}"))
                        }
                        Some(on) => Ok(on.clone()),
                        None => Ok(labels - &ignored),
                    };
                    let (matched, other) = (of(&left)?, of(&right)?);
                    if matched != other {
                        return Err(format!("the sides have the labels {left:?} and {right:?}"));
                    }
                    Vector(if many || level == 0 { left } else { matched })
                }
                _ => return Err("a range has no operators".into()),
            };
        }
        Ok(left)
    }

    fn operand(&mut self) -> Parsed {
        if self.eat("(") {
            let inner = self.binary(0)?;
            self.expect(")")?;
            return Ok(inner);
        }
        if self.rest.starts_with(|c: char| c.is_ascii_digit()) {
            let number = self.take(|c| c.is_ascii_digit() || c == '.');
            return number.parse::<f64>().map(|_| Number).map_err(|error| error.to_string());
        }
        let name = self.name()?;
        match name {
            "rate" | "increase" => self.rate(name),
            "histogram_quantile" => self.quantile(),
            _ if AGGREGATIONS.contains(&name) => self.aggregation(),
            _ if self.rest.starts_with('(') => Err(format!("unknown function {name}")),
            _ => self.selector(name),
        }
    }

    fn rate(&mut self, name: &str) -> Parsed {
        self.expect("(")?;
        let Range(labels, grows) = self.binary(0)? else {
            return Err(format!("{name} needs a range"));
        };
        self.expect(")")?;
        if grows { Ok(Vector(labels)) } else { Err(format!("{name} of something that shrinks")) }
    }

    fn quantile(&mut self) -> Parsed {
        self.expect("(")?;
        let Number = self.binary(0)? else { return Err("the quantile is no number".into()) };
        self.expect(",")?;
        let Vector(mut labels) = self.binary(0)? else {
            return Err("quantile of no vector".into());
        };
        self.expect(")")?;
        if labels.remove("le") { Ok(Vector(labels)) } else { Err("a quantile needs le".into()) }
    }

    fn aggregation(&mut self) -> Parsed {
        let by = if self.eat("by") { self.labels()? } else { Labels::new() };
        self.expect("(")?;
        let Vector(labels) = self.binary(0)? else { return Err("sum of no vector".into()) };
        self.expect(")")?;
        match by.difference(&labels).next() {
            Some(foreign) => Err(format!("by {foreign}, but there are {labels:?}")),
            None => Ok(Vector(by)),
        }
    }

    /// A list of labels in parentheses.
    fn labels(&mut self) -> Parsed<Labels> {
        self.expect("(")?;
        let mut labels = Labels::new();
        loop {
            labels.insert(self.name()?.to_owned());
            if !self.eat(",") {
                break;
            }
        }
        self.expect(")").map(|()| labels)
    }

    fn selector(&mut self, name: &str) -> Parsed {
        let mut series: Vec<&Series> = self.exported.series(name)?.iter().collect();
        if self.eat("{") {
            loop {
                self.matcher(name, &mut series)?;
                if !self.eat(",") {
                    break;
                }
            }
            self.expect("}")?;
        }
        let own = series.iter().flat_map(|series| series.keys().map(String::as_str));
        let labels: Labels = own.chain(TARGET).map(str::to_owned).collect();
        if !self.eat("[") {
            return Ok(Vector(labels));
        }
        let range = self.take(|c| c != ']');
        self.expect("]")?;
        let length = range.strip_suffix(['s', 'm', 'h', 'd']).map(str::parse::<u32>);
        if range != "$__rate_interval" && !matches!(length, Some(Ok(1..))) {
            return Err(format!("what is the range {range}?"));
        }
        Ok(Range(labels, self.exported.grows(name)))
    }

    /// Parses a matcher, and keeps the series that the matcher selects.
    fn matcher(&mut self, metric: &str, series: &mut Vec<&Series>) -> Parsed<()> {
        let label = self.name()?;
        let operators = ["=~", "!=", "="];
        let operator = operators.into_iter().find(|operator| self.eat(operator));
        self.expect("\"")?;
        let value = self.take(|c| c != '"');
        self.expect("\"")?;
        let variable = value.strip_prefix('$').is_some_and(|name| self.variables.contains(&name));
        if TARGET.contains(&label) {
            return if variable { Ok(()) } else { Err(format!("{label} {value:?} is unknown")) };
        }
        if !series.iter().any(|series| series.contains_key(label)) {
            return Err(format!("{metric} has no label {label} beside the other matchers"));
        }
        let values: Vec<&str> = match operator {
            Some("=~") => value.split('|').collect(),
            Some(_) => vec![value],
            None => return Err(format!("no operator after {label}")),
        };
        let is = |series: &Series, value: &str| series.get(label).is_some_and(|own| own == value);
        for value in &values {
            let excludes_nothing = operator == Some("!=") && value.is_empty();
            if !excludes_nothing && !series.iter().any(|series| is(series, value)) {
                return Err(format!("no {metric} has {label}={value:?} beside the other matchers"));
            }
        }
        series.retain(|series| match operator {
            Some("!=") if value.is_empty() => series.contains_key(label),
            Some("!=") => !is(series, value),
            _ => values.iter().any(|value| is(series, value)),
        });
        if series.is_empty() {
            return Err(format!("nothing is left of {metric} by {label}"));
        }
        Ok(())
    }
}
