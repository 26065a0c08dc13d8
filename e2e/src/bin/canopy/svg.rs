//! Line charts as SVG text.

use std::fmt::Write;

/// One line of a panel: a value for each mark of the x axis, where there is one.
pub struct Series {
    pub name: String,
    pub values: Vec<Option<f64>>,
}

/// One chart.
pub struct Panel {
    pub title: String,
    /// Lines of text under the chart.
    pub notes: Vec<String>,
    pub x_label: String,
    pub y_label: String,
    /// Marks of the x axis, at equal distances.
    pub marks: Vec<String>,
    pub series: Vec<Series>,
}

/// Told apart by readers who see few colours, and by their dashes.
const INKS: [(&str, &str); 6] = [
    ("#555555", "none"),
    ("#0072b2", "7 3"),
    ("#d55e00", "2 3"),
    ("#009e73", "none"),
    ("#cc79a7", "9 3 2 3"),
    ("#e69f00", "4 2"),
];
const WIDTH: f64 = 720.0;
const PLOT: (f64, f64, f64, f64) = (84.0, 40.0, 520.0, 250.0);
const LINE: f64 = 16.0;
/// Characters of a note's line.
const WRAP: usize = 108;

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A step of 1, 2 or 5 times a power of ten that divides `most` into at most six.
fn step(most: f64) -> f64 {
    let rough = most / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|times| times * power).find(|&step| step >= rough).unwrap_or(rough)
}

/// Words in lines of at most [`WRAP`] characters.
fn wrapped(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let full = lines.last().is_some_and(|line| !line.is_empty() && line.len() + word.len() >= WRAP);
        if full {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, content: &str) {
    let content = escaped(content);
    let _ = writeln!(out, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{content}</text>"#);
}

fn axes(out: &mut String, panel: &Panel, most: f64, x_of: &dyn Fn(usize) -> f64) {
    let (left, top, width, height) = PLOT;
    let mut value = 0.0;
    while value <= most * 1.0001 {
        let y = top + height * (1.0 - value / most);
        let right = left + width;
        let _ = writeln!(out, r##"<path d="M{left:.1} {y:.1}H{right:.1}" stroke="#dddddd"/>"##);
        let digits = if most < 10.0 { 1 } else { 0 };
        text(out, (left - 6.0, y + 4.0), "end", &format!("{value:.digits$}"));
        value += step(most);
    }
    for (index, mark) in panel.marks.iter().enumerate() {
        text(out, (x_of(index), top + height + 18.0), "middle", mark);
    }
    text(out, (left + width / 2.0, top + height + 36.0), "middle", &panel.x_label);
    text(out, (left - 60.0, top - 8.0), "start", &panel.y_label);
}

/// Draws a panel into `out`; returns its height.
fn draw(out: &mut String, panel: &Panel) -> f64 {
    let (left, top, width, height) = PLOT;
    let largest =
        panel.series.iter().flat_map(|series| &series.values).flatten().copied().fold(0.0, f64::max);
    let largest = if largest > 0.0 { largest } else { 1.0 };
    let most = (largest / step(largest)).ceil() * step(largest);
    let gap = width / panel.marks.len().max(1) as f64;
    let x_of = |index: usize| left + gap * (index as f64 + 0.5);
    text(out, (left - 60.0, 12.0), "start", &panel.title);
    axes(out, panel, most, &x_of);
    let mut labels: Vec<(f64, usize)> = Vec::new();
    for (index, series) in panel.series.iter().enumerate() {
        let (ink, dash) = INKS[index % INKS.len()];
        let y_of = |value: f64| top + height * (1.0 - value / most);
        let points: Vec<(f64, f64)> = series
            .values
            .iter()
            .enumerate()
            .filter_map(|(mark, value)| Some((x_of(mark), y_of((*value)?))))
            .collect();
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            out,
            r#"<polyline points="{}" fill="none" stroke="{ink}" stroke-width="2" stroke-dasharray="{dash}"/>"#,
            path.join(" ")
        );
        for (x, y) in &points {
            let _ = writeln!(out, r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{ink}"/>"#);
        }
        labels.extend(points.last().map(|point| (point.1, index)));
    }
    // Names at the lines' ends, none over another.
    labels.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut free = f64::NEG_INFINITY;
    for (y, index) in labels {
        let y = y.max(free);
        free = y + LINE;
        let (ink, _) = INKS[index % INKS.len()];
        let name = escaped(&panel.series[index].name);
        let x = left + width + 8.0;
        let _ = writeln!(out, r#"<text x="{x:.1}" y="{:.1}" fill="{ink}">{name}</text>"#, y + 4.0);
    }
    let mut y = top + height + 58.0;
    for line in panel.notes.iter().flat_map(|note| wrapped(note)) {
        text(out, (left - 60.0, y), "start", &line);
        y += LINE;
    }
    y + LINE
}

/// Panels one under the other as an SVG document.
pub fn document(title: &str, panels: &[Panel]) -> String {
    let (mut body, mut height) = (String::new(), 10.0);
    for panel in panels {
        let mut drawn = String::new();
        let taken = draw(&mut drawn, panel);
        let _ = writeln!(body, r#"<g transform="translate(0 {height:.1})">"#);
        body.push_str(&drawn);
        body.push_str("</g>\n");
        height += taken;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" font-family=\"sans-serif\" \
         font-size=\"12\" role=\"img\">\n<title>{}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n",
        escaped(title)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(values: Vec<Option<f64>>) -> Panel {
        Panel {
            title: "a < b".into(),
            notes: vec!["word ".repeat(60)],
            x_label: "x".into(),
            y_label: "y".into(),
            marks: vec!["1".into(), "2".into()],
            series: vec![Series { name: "one & two".into(), values }],
        }
    }

    #[test]
    fn values_lie_between_the_axis_and_the_top() {
        let svg = document("t", &[panel(vec![Some(3.0), Some(47.0)])]);
        let (_, top, _, height) = PLOT;
        let ys: Vec<f64> =
            svg.split("cy=\"").skip(1).map(|rest| rest.split('"').next().unwrap().parse().unwrap()).collect();
        // Steps of 10: the axis ends at 50.
        let want = [3.0, 47.0].map(|value: f64| top + height * (1.0 - value / 50.0));
        assert_eq!(ys.len(), 2);
        assert!(
            ys.iter().zip(want).all(|(got, want)| (got - want).abs() < 0.06),
            "{ys:?}, expected {want:?}"
        );
    }

    #[test]
    fn text_is_escaped_and_long_notes_are_broken() {
        let svg = document("t", &[panel(vec![None, Some(1.0)])]);
        assert!(svg.contains("a &lt; b") && svg.contains("one &amp; two"));
        assert!(wrapped(&"word ".repeat(60)).iter().all(|line| line.len() <= WRAP));
        assert_eq!(svg.matches("<circle").count(), 1);
    }

    #[test]
    fn steps_are_round() {
        for (most, want) in [(6.0, 1.0), (47.0, 10.0), (100.0, 20.0), (1300.0, 500.0), (0.9, 0.2)] {
            assert!((step(most) - want).abs() < 1e-9, "{most}: {}", step(most));
        }
    }
}
