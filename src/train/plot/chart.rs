//! Draws a line chart as SVG.

use std::fmt::Write as _;

use super::axis::Axis;

/// The distances in pixels between the borders of a chart and its curves.
const LEFT_MARGIN: f64 = 96.0;
const RIGHT_MARGIN: f64 = 20.0;
const TOP_MARGIN: f64 = 62.0;
const BOTTOM_MARGIN: f64 = 50.0;

/// The width in pixels of a character of a tick's label, in a wide font.
const LABEL_CHARACTER_WIDTH: f64 = 7.7;

/// The maximum number of points that are drawn for a curve. Some points of longer curves are left out.
const CURVE_POINTS_MAX: usize = 1000;
/// The colors of the grid, the axes and the dashed lines.
pub(super) const GRID_COLOR: &str = "#ddd";
pub(super) const AXIS_COLOR: &str = "#333";
pub(super) const MARK_COLOR: &str = "#666";

/// Colors of curves that people with color blindness can distinguish (Okabe and Ito 2008).
pub const CURVE_COLORS: [&str; 4] = [BLUE, ORANGE, GREEN, PURPLE];
pub(super) const BLUE: &str = "#0072b2";
pub(super) const ORANGE: &str = "#d55e00";
pub(super) const GREEN: &str = "#009e73";
const PURPLE: &str = "#cc79a7";

/// If a curve has at most this many points, a dot marks each point.
const POINTS_WITH_DOTS_MAX: usize = 30;

/// A line chart.
#[derive(Clone, PartialEq, Debug)]
pub struct Chart {
    /// The text above the chart.
    pub title: String,
    /// The horizontal axis.
    pub x_axis: HorizontalAxis,
    /// The text beside the vertical axis.
    pub y_label: String,
    /// The scale of the vertical axis.
    pub y_scale: VerticalScale,
    /// The curves.
    pub curves: Vec<Curve>,
    /// The epoch with the lowest validation loss, which the chart marks.
    pub best_epoch: Option<u64>,
}

/// The horizontal axis of a chart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HorizontalAxis {
    /// Epochs, on a linear scale.
    Epochs,
    /// Sizes in bytes, on a logarithmic scale with ticks at powers of 2.
    Bytes,
}

/// The scale of the vertical axis of a chart.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum VerticalScale {
    /// Linear, or logarithmic for positive values that differ by more than a factor of 30.
    Automatic {
        /// The margin above the largest value does not extend beyond this value, for example 1 for an accuracy.
        margin_limit: f64,
    },
    /// Logarithmic. All values must be above zero.
    Logarithmic,
}

/// A curve of a chart.
#[derive(Clone, PartialEq, Debug)]
pub struct Curve {
    /// The name in the legend.
    pub name: String,
    /// An SVG color, such as `#0072b2`.
    pub color: &'static str,
    /// The epoch or the size of each point, and its value. All values are finite.
    pub points: Vec<(u64, f64)>,
}

/// A rectangle in pixels.
#[derive(Clone, Copy)]
pub(super) struct PlotArea {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

impl Chart {
    /// Appends the chart to an SVG document.
    pub(super) fn draw(&self, svg: &mut String, area: PlotArea) {
        let plot = PlotArea {
            left: area.left + LEFT_MARGIN,
            top: area.top + TOP_MARGIN,
            width: area.width - LEFT_MARGIN - RIGHT_MARGIN,
            height: area.height - TOP_MARGIN - BOTTOM_MARGIN,
        };
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let (first, last) = (
            points().map(|&(x, _)| x).min().unwrap_or_default(),
            points().map(|&(x, _)| x).max().unwrap_or_default(),
        );
        let x_axis = match self.x_axis {
            HorizontalAxis::Epochs => Axis::for_counts(first, last),
            HorizontalAxis::Bytes => Axis::for_sizes(first, last),
        };
        let values = points().map(|&(_, value)| value);
        let y_axis = match self.y_scale {
            VerticalScale::Automatic { margin_limit } => Axis::for_values(values, margin_limit),
            VerticalScale::Logarithmic => Axis::for_positive_values(values),
        };
        self.draw_labels(svg, plot, &y_axis);
        draw_grid(svg, plot, &x_axis, &y_axis);
        if let Some(epoch) = self.best_epoch {
            let best_x = plot.left + plot.width * x_axis.position(epoch as f64);
            draw_dashed_line(svg, (best_x, plot.top), (best_x, plot.top + plot.height));
        }
        for curve in &self.curves {
            curve.draw(svg, plot, (&x_axis, &y_axis));
        }
    }

    /// Draws the title, the legend and the names of the axes.
    fn draw_labels(&self, svg: &mut String, plot: PlotArea, y_axis: &Axis) {
        let (middle, bottom) = (plot.left + plot.width / 2.0, plot.top + plot.height);
        write_text(svg, (plot.left, plot.top - 38.0), "font-weight=\"bold\" font-size=\"14\"", &self.title);
        let x_label = match self.x_axis {
            HorizontalAxis::Epochs => "epoch",
            HorizontalAxis::Bytes => "size in bytes, logarithmic",
        };
        write_text(svg, (middle, bottom + 38.0), "text-anchor=\"middle\"", x_label);
        let characters = y_axis.labels().map(|(_, label)| label.chars().count()).max().unwrap_or_default();
        let left = plot.left - 14.0 - LABEL_CHARACTER_WIDTH * characters as f64;
        let center = plot.top + plot.height / 2.0;
        let turned = format!("text-anchor=\"middle\" transform=\"rotate(-90 {left:.1} {center:.1})\"");
        let scale = if y_axis.is_logarithmic() { ", logarithmic" } else { "" };
        write_text(svg, (left, center), &turned, &format!("{}{scale}", self.y_label));
        self.draw_legend(svg, plot);
    }

    fn draw_legend(&self, svg: &mut String, plot: PlotArea) {
        let (mut x1, y) = (plot.left, plot.top - 17.0);
        for curve in &self.curves {
            let x2 = x1 + 20.0;
            let _ = writeln!(
                svg,
                "<line x1=\"{x1:.1}\" y1=\"{y:.1}\" x2=\"{x2:.1}\" y2=\"{y:.1}\" stroke=\"{}\" stroke-width=\"3\"/>",
                curve.color
            );
            write_text(svg, (x1 + 26.0, y + 4.0), "", &curve.name);
            x1 += 46.0 + 6.6 * curve.name.chars().count() as f64;
        }
        if let Some(epoch) = self.best_epoch {
            draw_dashed_line(svg, (x1, y), (x1 + 20.0, y));
            write_text(svg, (x1 + 26.0, y + 4.0), "", &format!("best epoch ({epoch})"));
        }
    }
}

impl Curve {
    fn draw(&self, svg: &mut String, plot: PlotArea, (x_axis, y_axis): (&Axis, &Axis)) {
        let mut positions = String::new();
        let mut dots = String::new();
        for (x, value) in select_points_to_draw(&self.points) {
            let x = plot.left + plot.width * x_axis.position(x as f64);
            let y = plot.top + plot.height * (1.0 - y_axis.position(value));
            let _ = write!(positions, "{x:.1},{y:.1} ");
            if self.points.len() <= POINTS_WITH_DOTS_MAX {
                let _ = write!(dots, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{}\"/>", self.color);
            }
        }
        let positions = positions.trim_end();
        let _ = writeln!(
            svg,
            "<polyline points=\"{positions}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-linejoin=\"round\"/>{dots}",
            self.color
        );
    }
}

fn draw_grid(svg: &mut String, plot: PlotArea, x_axis: &Axis, y_axis: &Axis) {
    let PlotArea { left, top, width, height } = plot;
    let (right, bottom) = (left + width, top + height);
    for (position, label) in y_axis.labels() {
        let y = bottom - height * position;
        let _ = writeln!(
            svg,
            "<line x1=\"{left:.1}\" y1=\"{y:.1}\" x2=\"{right:.1}\" y2=\"{y:.1}\" stroke=\"{GRID_COLOR}\"/>"
        );
        write_text(svg, (left - 8.0, y + 4.0), "text-anchor=\"end\"", &label);
    }
    for (position, label) in x_axis.labels() {
        let x = left + width * position;
        let tick_end = bottom + 5.0;
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{bottom:.1}\" x2=\"{x:.1}\" y2=\"{tick_end:.1}\" stroke=\"{AXIS_COLOR}\"/>"
        );
        write_text(svg, (x, bottom + 20.0), "text-anchor=\"middle\"", &label);
    }
    let _ = writeln!(
        svg,
        "<path d=\"M{left:.1} {top:.1}V{bottom:.1}H{right:.1}\" fill=\"none\" stroke=\"{AXIS_COLOR}\"/>"
    );
}

fn draw_dashed_line(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{MARK_COLOR}\" stroke-dasharray=\"4 3\"/>"
    );
}

/// Appends a text element to the document. `attributes` holds SVG attributes of the element.
pub(super) fn write_text(svg: &mut String, (x, y): (f64, f64), attributes: &str, text: &str) {
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" {attributes}>{}</text>", escape(text));
}

/// Returns the text with the characters that XML and HTML do not allow as entities. Replaces control characters, which have no
/// entity.
pub(super) fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;");
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Returns at most [`CURVE_POINTS_MAX`] of the points. Divides longer curves into ranges of equal length, and keeps
/// the lowest and the highest point of each range, so that peaks remain visible.
fn select_points_to_draw(points: &[(u64, f64)]) -> Vec<(u64, f64)> {
    if points.len() <= CURVE_POINTS_MAX {
        return points.to_vec();
    }
    let mut kept = Vec::with_capacity(CURVE_POINTS_MAX);
    for range in points.chunks(points.len().div_ceil(CURVE_POINTS_MAX / 2)) {
        let compare = |a: &&(u64, f64), b: &&(u64, f64)| a.1.total_cmp(&b.1);
        let mut pair: Vec<_> =
            range.iter().min_by(compare).into_iter().chain(range.iter().max_by(compare)).collect();
        pair.sort_by_key(|(x, _)| *x);
        pair.dedup();
        kept.extend(pair.into_iter().copied());
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_curve_keeps_its_peaks() {
        let mut points: Vec<(u64, f64)> = (0..100_000).map(|epoch| (epoch, 1.0)).collect();
        (points[77_777].1, points[12].1) = (9.0, -3.0);
        let kept = select_points_to_draw(&points);
        assert!(
            kept.len() <= CURVE_POINTS_MAX && kept.contains(&(77_777, 9.0)) && kept.contains(&(12, -3.0))
        );
        assert!(kept.is_sorted_by_key(|(epoch, _)| *epoch));
        assert_eq!(select_points_to_draw(&points[..50]), points[..50]);
    }

    #[test]
    fn special_characters_in_texts_become_xml_entities() {
        let mut svg = String::new();
        write_text(&mut svg, (1.0, 2.0), "", "a<b> & \u{7}");
        assert_eq!(svg, "<text x=\"1.0\" y=\"2.0\" >a&lt;b&gt; &amp; \u{fffd}</text>\n");
    }
}
