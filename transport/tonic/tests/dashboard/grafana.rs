//! Reads docs/dashboard.json, and checks its form: what Grafana needs to show each panel.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::exported::Exported;
use crate::promql::check;

const FILE: &str = include_str!("../../../../docs/dashboard.json");

fn dashboard() -> Value {
    serde_json::from_str(FILE).unwrap()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no {key} in {value}"))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("no list {key} in {value}"))
}

/// Checks each query, and that its legend names the labels of its series. Returns the mistakes.
pub(crate) fn wrong_queries(exported: &Exported) -> Vec<String> {
    let dashboard = dashboard();
    let variables = list(&dashboard["templating"], "list");
    let names: Vec<&str> = variables.iter().map(|variable| text(variable, "name")).collect();
    let mut wrong = Vec::new();
    for variable in variables.iter().filter(|variable| text(variable, "type") == "query") {
        let query = text(&variable["query"], "query");
        let metric =
            query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(", job)"));
        wrong.extend(exported.series(metric.unwrap()).err());
    }
    for panel in list(&dashboard, "panels").iter().filter(|panel| text(panel, "type") != "row") {
        for target in list(panel, "targets") {
            let labels = match check(text(target, "expr"), exported, &names) {
                Ok(labels) => labels,
                Err(error) => {
                    wrong.push(format!("{}: {error}", text(panel, "title")));
                    continue;
                }
            };
            let legend = text(target, "legendFormat");
            let named = legend.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap());
            let named: BTreeSet<String> = named.map(str::to_owned).collect();
            if named != labels {
                let title = text(panel, "title");
                wrong.push(format!("{title}: the legend {legend:?} is for {labels:?}"));
            }
        }
    }
    wrong
}

#[test]
fn the_dashboard_has_the_form_that_grafana_reads() {
    let dashboard = dashboard();
    for key in ["uid", "title", "description", "timezone", "refresh"] {
        text(&dashboard, key);
    }
    assert!(dashboard["schemaVersion"].as_u64() >= Some(36) && dashboard.get("id").is_none());
    let variables = list(&dashboard["templating"], "list");
    assert_eq!(
        (text(&variables[0], "name"), text(&variables[0], "type"), text(&variables[0], "query")),
        ("datasource", "datasource", "prometheus")
    );
    let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
    for panel in list(&dashboard, "panels") {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "an id twice: {panel}");
        assert!(!text(panel, "title").is_empty());
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().unwrap());
        assert!(w > 0 && h > 0 && x + w <= 24, "{panel}");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(cells.insert(cell), "panels overlap: {panel}");
        }
        match text(panel, "type") {
            "row" => continue,
            "timeseries" | "stat" => {}
            other => panic!("what is a panel {other}?"),
        }
        assert!(!text(panel, "description").is_empty());
        assert!(!text(&panel["fieldConfig"]["defaults"], "unit").is_empty());
        assert!(list(&panel["fieldConfig"], "overrides").is_empty());
        assert_eq!(text(&panel["datasource"], "type"), "prometheus");
        assert_eq!(text(&panel["datasource"], "uid"), "${datasource}");
        let refs: BTreeSet<_> =
            list(panel, "targets").iter().map(|target| text(target, "refId")).collect();
        assert!(!refs.is_empty() && refs.len() == list(panel, "targets").len(), "{panel}");
    }
}
